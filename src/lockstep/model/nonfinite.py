"""Why a loss is NaN or infinite: what was not finite first in an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.tensors.pytree import named_tensors

_HUGE = 1e8
"""Outputs of a model that doesn't diverge are smaller."""

_SMALLER_STEPS = "try a smaller learning rate, or clip_norm"


def why_not_finite(model: nn.Module, part: Part, outputs: Any, *, first: bool) -> str:
    """Find what to look at where the loss of a local batch is not finite.

    Args:
        model: made the outputs.
        part: the local batch.
        outputs: of the model.
        first: whether nothing was updated yet in this process.
    """
    in_inputs = _nan_in(part, "inputs")
    if in_inputs is not None:
        return f"{in_inputs}: clean the data, or mask what is missing"
    in_targets = _nan_in(part, "targets")
    found = _name_in_model(model)
    if found is not None and first:
        return (
            f"{found} is not finite before the first update: check how it is initialized, or loaded"
        )
    if found is not None and in_targets is not None:
        return (
            f"{found} is not finite since an earlier update, and {in_targets}: a loss that masks "
            "NaN by torch.where, or by a factor of 0, still has NaN gradients; replace NaN by a "
            "number first"
        )
    if found is not None:
        return f"{found} is not finite since an earlier update: {_SMALLER_STEPS}"
    reason = _why_outputs(dict(named_tensors(outputs)), first=first)
    if reason is not None:
        return reason
    if in_targets is not None:
        return f"{in_targets}, and the loss doesn't leave them out"
    return (
        "the model's outputs are finite, so the loss itself divides by 0 (are all items of the "
        "batch masked?), takes the logarithm of 0, or overflows"
    )


def _name_in_model(model: nn.Module) -> str | None:
    """Find the first parameter that is not finite, or buffer that has NaN, on this rank."""
    for name, p in model.named_parameters():
        if not _is_finite(_local(p)):
            return f'parameter "{name}"'
    for name, buffer in model.named_buffers():
        if _is_nan(_local(buffer)):
            return f'buffer "{name}"'
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Give this rank's part of a shard, or the tensor itself."""
    local: torch.Tensor = getattr(tensor, "to_local", tensor.detach)()
    return local


def _why_outputs(outputs: dict[str, torch.Tensor], *, first: bool) -> str | None:
    """Explain outputs that are not finite, or too large; None where they are neither.

    Args:
        outputs: by their names in the nest that the model gave.
        first: whether nothing was updated yet in this process.
    """
    not_finite = {name: t for name, t in outputs.items() if not _is_finite(t)}
    are_numbers = not any(t.dim() for t in not_finite.values())
    if not_finite and len(not_finite) < len(outputs) and are_numbers:
        return (
            f'the model\'s output "{next(iter(not_finite))}" is not finite, though others are: '
            "does it divide by 0 (are all items of the local batch masked)?"
        )
    if not_finite:
        advice = "does its forward divide by 0, or overflow?" if first else _SMALLER_STEPS
        return f"inputs and weights are finite, the model's outputs are not: {advice}"
    largest = max(map(_largest, outputs.values()), default=0.0)
    if not first and largest > _HUGE:
        return f"the model's outputs have grown to {largest:.0e}: {_SMALLER_STEPS}"
    return None


def _nan_in(part: Part, what: str) -> str | None:
    """Give ``the inputs of sample 17 have NaN``, or None where there is none.

    Args:
        part: a local batch.
        what: ``inputs`` or ``targets``.
    """
    for name, tensor in named_tensors(getattr(part, what)):
        if not _is_nan(tensor):
            continue
        called = f' "{name}"' if name else ""
        if not tensor.dim() or tensor.shape[0] != part.size:
            return f"the {what}{called} have NaN"
        row = int(tensor.isnan().reshape(part.size, -1).any(1).nonzero()[0])
        owner = f"row {row} of the local batch"
        if part.samples is not None:
            owner = f"sample {int(part.samples[row])}"
        return f"the {what}{called} of {owner} have NaN"
    return None


def _is_nan(tensor: torch.Tensor) -> bool:
    return tensor.dtype.to_real().is_floating_point and bool(tensor.isnan().any())


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.to_real().is_floating_point or bool(tensor.isfinite().all())


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().max())
