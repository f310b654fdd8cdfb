"""Why a loss is NaN or infinite: what was not finite first in an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.tensors.pytree import named_tensors, tensors

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
    if not all(map(_is_finite, tensors(outputs))):
        reason = (
            "inputs and weights are finite, the model's outputs are not: does its forward divide "
            "by 0, or overflow?"
        )
    elif in_targets is not None:
        return f"{in_targets}, and the loss doesn't leave them out"
    else:
        reason = (
            "the model's outputs are finite, so the loss itself divides by 0 (are all items of the "
            "batch masked?), takes the logarithm of 0, or overflows"
        )
    return reason if first else f"{reason}; {_SMALLER_STEPS}"


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
