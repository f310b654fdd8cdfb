"""What a computing thread takes over from the thread that calls it.

PyTorch keeps grad mode, autocast and the default device per thread, so a bare thread computes
gradients inside somebody's ``no_grad`` and in full precision inside somebody's ``autocast``.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from lockstep.launch.devices import Device

T = TypeVar("T")

_CPU = torch.device("cpu")


class Caller:
    """The state of the calling thread: grad and inference mode, autocast, context variables,
    streams, default device.

    A default device that is an accelerator becomes each thread's own accelerator; slots need none.

    Args:
        devices: those that will compute; the caller's current stream on each accelerator among them
            is kept.
    """

    __slots__ = ("autocast", "cache", "context", "default", "grad", "inference", "streams")

    def __init__(self, devices: Iterable[Device]) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        busy = [device for device in devices if not device.is_slot]
        kinds = {"cpu", *(device.type for device in busy)}
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.default = torch.get_default_device() if busy else _CPU
        self.context = contextvars.copy_context()
        self.streams = {device: torch.accelerator.current_stream(device.torch) for device in busy}

    def run(self, function: Callable[[], T], device: Device) -> T:
        """Call ``function`` in this thread as if it were the caller's, but computing on
        ``device``.

        Grad mode and autocast stay in the thread: each call sets them anew.
        """
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_cache_enabled(self.cache)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if any(enabled for _, enabled, _ in self.autocast):
            try:
                return self._run_in_modes(function, device)
            finally:
                # it would outlive the caller's ``with``, and its weights
                torch.clear_autocast_cache()
        return self._run_in_modes(function, device)

    def _run_in_modes(self, function: Callable[[], T], device: Device) -> T:
        """Call ``function`` in the caller's context variables, and in modes that are contexts."""
        context = self.context.copy()  # one context can't be entered by two threads
        if device.is_slot and not self.inference:
            return context.run(function)
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default.type == device.type and not device.is_slot:
                stack.enter_context(device.torch)  # "the accelerator" means each thread's own
            # A copy from another device is behind what the caller has given to its stream there.
            for other, one in self.streams.items():
                if other != device and one.stream_id:
                    stack.enter_context(_same(one))
            if device in self.streams:
                stack.enter_context(_same(self.streams[device]))
            return context.run(function)


def _same(one: torch.Stream) -> torch.Stream:
    """Give the stream as an object of this thread's own: only one thread can enter an object."""
    return torch.Stream(
        stream_id=one.stream_id,
        device_index=one.device_index,
        device_type=one.device_type,
    )
