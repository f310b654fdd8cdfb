"""Precision: the number formats that a job computes in.

====  ============================================================================================
None  as the model was built
fp64  parameters and inputs in float64, and the tensors of a loss that is a module (the weights of
      classes)
fp32  the same in float32
tf32  as fp32, with products that CUDA devices round to TensorFloat-32 (10 bits of mantissa), for as
      long as the run lasts; on other devices the same as fp32
bf16  parameters in float32; operators that gain by it in bfloat16 (PyTorch's autocast), the loss in
      float32
fp16  the same with float16, and a scaled loss, so that small gradients are not lost. The scale is
      the same on all ranks, since each of them decides by the sum of all gradients
====  ============================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from lockstep.launch.processes.modes import flags, set_flags
from lockstep.launch.world import World

PrecisionName = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

_WHOLE = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32}
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = ("cuda",)
"""Types of device whose products of float32 may be rounded to TensorFloat-32."""


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Let CUDA devices round products of float32 to TensorFloat-32 for a while.

    PyTorch's older names are set: compiled code reads the settings by these, and can't where only
    the new ones were set.
    """
    before = flags()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        set_flags(before)


def note_on_precision(name: PrecisionName | None, device_type: str) -> str | None:
    """Explain a precision that does nothing on this type of device; None for another."""
    if name != "tf32" or device_type in ROUNDING:
        return None
    where = "CPU devices" if device_type == "cpu" else device_type
    return f"precision: tf32 is for CUDA devices; on {where} products are those of fp32"


class Precision:
    """How a step computes on one kind of device.

    Args:
        name: a row of the table above.
        world: TF32 is on until its end; its first device has the type of all devices.
        caches: whether autocast keeps converted weights within a forward. Several threads must not
            where one compiles: that one waits for the cache with Python's lock held, and one that
            empties the cache waits for Python's lock (torch 2.13).

    Attributes:
        whole: the dtype that floating inputs are converted to, or None.
        scaler: scales the loss under fp16, else None.
    """

    def __init__(self, name: PrecisionName | None, world: World, *, caches: bool = True) -> None:
        self.whole = _WHOLE.get(name or "")
        self._mixed = _MIXED.get(name or "")
        self._device_type = world.device.type
        self._caches = caches
        self.scaler: torch.amp.GradScaler | None = None
        if name == "tf32" and self._device_type in ROUNDING:
            world.at_end.enter_context(rounded_products())
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(self._device_type)
            # The scale is made now, by one thread: the replicas of dp read it at the same time.
            self.scaler.scale(torch.zeros((), device=self._device_type))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Give the context in which a forward and its loss run."""
        if self._mixed is None:
            return _NOTHING
        return torch.autocast(self._device_type, dtype=self._mixed, cache_enabled=self._caches)


def convert_model(model: nn.Module, name: PrecisionName | None) -> None:
    """Convert parameters and buffers to the dtype that they are kept in."""
    if name == "fp64":
        model.double()
        model._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)  # type: ignore[no-untyped-call]
    elif name is not None:
        model.float()
