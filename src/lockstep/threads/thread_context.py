"""What a computing thread takes over from the thread that calls it.

PyTorch keeps grad mode and autocast per thread, so a bare thread computes gradients inside
somebody's ``no_grad`` and in full precision inside somebody's ``autocast``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from lockstep.launch.devices import Device

T = TypeVar("T")


class Caller:
    """The state of the calling thread: grad and inference mode, autocast, context variables,
    streams.

    Args:
        devices: those that will compute; the caller's current stream on each accelerator among them
            is kept.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._streams = {}
        kinds = {"cpu"}
        for device in devices:
            if not device.is_slot:
                kinds.add(device.type)
                self._streams[device] = torch.accelerator.current_stream(device.torch)
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._context = contextvars.copy_context()

    def run(self, function: Callable[[], T], device: Device) -> T:
        """Call ``function`` in this thread as if it were the caller's, but computing on
        ``device``.

        Grad mode and autocast stay in the thread: each call sets them anew.
        """
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_cache_enabled(self._caches)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        context = self._context.copy()  # one context can't be entered by two threads
        with contextlib.ExitStack() as stack:
            if any(enabled for _, enabled, _ in self._autocast):
                # It would outlive the caller's ``with``, and its weights.
                stack.callback(torch.clear_autocast_cache)
            if self._inference:
                stack.enter_context(torch.inference_mode())
            # A copy from another device is behind what the caller has given to its stream there.
            for place in sorted(self._streams, key=device.__eq__):  # the own one is current
                stack.enter_context(_same(self._streams[place]))
            return context.run(function)


def _same(one: torch.Stream) -> torch.Stream:
    """Give the stream as an object of this thread's own: only one thread can enter an object."""
    return torch.Stream(
        stream_id=one.stream_id,
        device_index=one.device_index,
        device_type=one.device_type,
    )
