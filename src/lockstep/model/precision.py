"""Precision: the number formats that a job computes in.

====  =============================================================================================================
None  as the model was built
fp64  parameters and inputs in float64, and what a loss that is a module keeps (the weights of classes)
fp32  the same in float32
tf32  as fp32, with products that CUDA devices round to TensorFloat-32 (10 bits of mantissa), for as long as the run
      lasts; elsewhere nothing else is computed
bf16  parameters in float32; operators that gain by it in bfloat16 (PyTorch's autocast), the loss in float32
fp16  the same with float16, and a scaled loss: gradients that float16 could not hold are carried through it. The scale
      is the same on all ranks, since each of them decides by the sum of all gradients
====  =============================================================================================================
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from lockstep.errors import JobError, first_line
from lockstep.launch.processes.call import flags, set_flags
from lockstep.launch.world import World
from lockstep.tensors.common_memory import common_memory_kept

PrecisionName = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

_WHOLE = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32}
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = ("cuda",)
"""Types of device whose products of float32 may be rounded to TensorFloat-32."""


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Let CUDA devices round products of float32 to TensorFloat-32 for a while.

    By PyTorch's older names: compiled code asks for the settings by these, and can't where only the new ones were set.
    """
    before = flags()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        set_flags(before)


def note_on_precision(name: PrecisionName | None, device_type: str) -> str | None:
    """What the person has to know of a precision on this type of device."""
    if name != "tf32" or device_type in ROUNDING:
        return None
    where = "CPU devices" if device_type == "cpu" else device_type
    return f"precision: tf32 is for CUDA devices; on {where} products are those of fp32"


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """Compute products of float32 in float32 for a while: TF32 rounds each way of computing one otherwise."""
    backends: Any = torch.backends
    flags = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    before = [flag.fp32_precision for flag in flags]
    try:
        for flag in flags:
            flag.fp32_precision = "ieee"
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


class Precision:
    """How a step computes on one kind of device.

    Args:
        name: as in the table above.
        world: in whose time TF32 is on, and of whose first device's type the devices are.

    Attributes:
        whole: the format of floating inputs, or None as they are.
        scaler: scales the loss under fp16, else None.

    Raises:
        JobError: devices of that type can't compute in that format.
    """

    def __init__(self, name: PrecisionName | None, world: World) -> None:
        self.whole = _WHOLE.get(name or "")
        self._mixed = _MIXED.get(name or "")
        self._device_type = device_type = world.device.type
        self.scaler: torch.amp.GradScaler | None = None
        self._try(name)
        if name == "tf32" and device_type in ROUNDING:
            world.at_end.enter_context(rounded_products())
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device_type)
            # Made now, by one thread; the replicas of dp ask for it at the same time.
            self.scaler.scale(torch.zeros((), device=device_type))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What a forward and its loss run in."""
        if self._mixed is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._mixed)

    def _try(self, name: PrecisionName | None) -> None:
        """Multiply one by one in that format: what a device can't do may raise, or be passed over with a warning."""
        if self._mixed is None:
            return
        try:
            with warnings.catch_warnings(), self.autocast():
                warnings.simplefilter("error")
                one = torch.ones(1, 1, device=self._device_type, dtype=torch.float32)
                found = (one @ one).dtype
        except (RuntimeError, Warning) as error:
            reason = first_line(error)
            raise JobError(
                f"precision: {name} doesn't work on {self._device_type} here: {reason}"
            ) from error
        if found is not self._mixed:
            raise JobError(
                f"precision: {name} doesn't work on {self._device_type} here, which computed in "
                f"{found}"
            )


def convert_model(model: nn.Module, name: PrecisionName | None) -> None:
    """Turn parameters and buffers to the format that they are kept in.

    Raises:
        JobError: fp16 with complex parameters, whose gradients PyTorch can't scale.
    """
    if name == "fp16" and (
        found := next((n for n, p in model.named_parameters() if p.is_complex()), None)
    ):
        raise JobError(
            f"precision: \"{found}\" is complex, which fp16's scaled loss can't be used with: "
            "take bf16"
        )
    with common_memory_kept(model):
        if name == "fp64":
            model.double()
            model._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)  # type: ignore[no-untyped-call]
        elif name is not None:
            model.float()
