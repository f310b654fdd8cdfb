"""PyTorch's modes and settings that change numbers, as one process gives them to another.

Both are lists of what is to be called: functions of PyTorch with their arguments.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.launch.devices import Device

Modes = list[tuple[Any, ...]]
"""The modes of a thread: classes of contexts, each with its arguments."""


def modes_here(devices: tuple[Device, ...]) -> Modes:
    """Return the modes of the calling thread.

    Args:
        devices: where another process is to compute.
    """
    modes: Modes = [
        (torch.inference_mode, torch.is_inference_mode_enabled()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    for kind in {"cpu"} | {device.type for device in devices}:
        if torch.is_autocast_enabled(kind):
            modes.append((torch.autocast, kind, torch.get_autocast_dtype(kind)))
    return modes


@contextlib.contextmanager
def entered(modes: Modes) -> Iterator[None]:
    """Compute in these modes for a while."""
    with contextlib.ExitStack() as stack:
        for context, *arguments in modes:
            stack.enter_context(context(*arguments))
        yield


_FLAGS = (
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.allow_tf32",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_accumulation",
)
"""Flags of ``torch.backends``, in an order in which they can be set: PyTorch's old names of a
setting before its new ones.
"""

_MATMUL = "float32_matmul_precision"


def _flag(name: str) -> Any:
    """Return a flag; None where it was set under its new name, so PyTorch refuses its old one."""
    with contextlib.suppress(RuntimeError):
        return operator.attrgetter(name)(torch.backends)
    return None


def flags() -> dict[str, Any]:
    """Return PyTorch's settings of how products round."""
    found = {name: _flag(name) for name in _FLAGS}
    with contextlib.suppress(RuntimeError):
        found[_MATMUL] = torch.get_float32_matmul_precision()
    return found


def set_flags(wanted: dict[str, Any]) -> None:
    """Set PyTorch's flags as ``flags`` found them."""
    if _MATMUL in wanted:
        torch.set_float32_matmul_precision(wanted[_MATMUL])
    for flag in _FLAGS:
        if wanted[flag] is not None and _flag(flag) != wanted[flag]:
            owner, _, name = flag.rpartition(".")
            setattr(operator.attrgetter(owner)(torch.backends), name, wanted[flag])


def switches() -> list[tuple[Callable[[Any], None], Any]]:
    """Return PyTorch's settings that belong to the whole process, each with what sets it."""
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (set_flags, flags()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
    ]
