"""Modes: those of PyTorch's that belong to a thread, handed over to the processes that compute for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lockstep.launch.devices import Device


class Modes(NamedTuple):
    """PyTorch's modes of a thread, in which another process is to compute for it.

    Attributes:
        grad: whether gradients are followed.
        inference: whether that is inference mode.
        autocast: for each type of device whether it is on, and to what.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def here(cls, devices: tuple[Device, ...]) -> Modes:
        """Those of the calling thread."""
        kinds = sorted({"cpu"} | {device.type for device in devices})
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Compute in them for a while."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            yield
