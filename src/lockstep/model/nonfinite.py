"""Why a loss is NaN or infinite: what of an update was not finite first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.tensors.pytree import named_tensors

_HUGE = 1e8
"""Outputs of a model that doesn't diverge are smaller."""


def why_not_finite(model: nn.Module, part: Part, outputs: Any, *, first: bool) -> str:
    """What to look at, where the loss of a local batch is not finite.

    Args:
        model: that made the outputs.
        part: the local batch.
        outputs: of the model.
        first: whether nothing was updated yet in this process.
    """
    if (found := _nan_in(part, "inputs")) is not None:
        return f"{found}: clean the data, or mask what is missing"
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        here = (
            (name, getattr(t, "to_local", t.detach)()) for name, t in tensors
        )  # of a shard, this rank's part
        name = next(
            (name for name, t in here if _is_nan(t) or (kind == "parameter" and not _is_finite(t))),
            None,
        )
        if name is not None and first:
            return (
                f'{kind} "{name}" is not finite before the first update: look at how it is '
                "initialised, or loaded"
            )
        if name is not None and (found := _nan_in(part, "targets")) is not None:
            return (
                f'{kind} "{name}" is not finite since an earlier update, and {found}: a loss that '
                "leaves NaN out by "
                "torch.where, or times 0, has NaN gradients all the same; put a number in its "
                "place before"
            )
        if name is not None:
            return (
                f'{kind} "{name}" is not finite since an earlier update: try a smaller '
                "learning rate, or clip_norm"
            )
    not_finite = {name: t for name, t in named_tensors(outputs) if not _is_finite(t)}
    if (
        not_finite
        and len(not_finite) < sum(1 for _ in named_tensors(outputs))
        and not any(t.dim() for t in not_finite.values())
    ):
        name = next(iter(not_finite))
        return (
            f'the model\'s output "{name}" is not finite, though others are: does it divide by 0 '
            "(are all items of the "
            "local batch masked)?"
        )
    if not_finite:
        if first:
            return (
                "inputs and weights are finite, the model's outputs are not: does its forward "
                "divide by 0, or overflow?"
            )
        return (
            "inputs and weights are finite, the model's outputs are not: try a smaller "
            "learning rate, or clip_norm"
        )
    largest = max((_largest(t) for _, t in named_tensors(outputs)), default=0.0)
    if not first and largest > _HUGE:
        return (
            f"the model's outputs have grown to {largest:.0e}: try a smaller learning rate, or "
            "clip_norm"
        )
    if (found := _nan_in(part, "targets")) is not None:
        return f"{found}, and the loss doesn't leave them out"
    return (
        "the model's outputs are finite, so the loss itself divides by 0 (are all items of the "
        "batch masked?), "
        "takes the logarithm of 0, or overflows"
    )


def _nan_in(part: Part, what: str) -> str | None:
    """``the inputs of sample 17 have NaN``; None where there is none."""
    for name, tensor in named_tensors(getattr(part, what)):
        if not _is_nan(tensor):
            continue
        called = f' "{name}"' if name else ""
        if tensor.dim() and tensor.shape[0] == part.size:
            row = int(tensor.isnan().reshape(part.size, -1).any(1).nonzero()[0])
            whose = (
                f"sample {int(part.samples[row])}"
                if part.samples is not None
                else f"row {row} of the local batch"
            )
            return f"the {what}{called} of {whose} have NaN"
        return f"the {what}{called} have NaN"
    return None


def _is_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _largest(tensor: torch.Tensor) -> float:
    return (
        float(tensor.detach().abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
    )
