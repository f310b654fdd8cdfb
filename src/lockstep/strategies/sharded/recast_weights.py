"""Weights that autocast casts in a block's forward aren't kept for backward, which casts them
again.

Autograd would keep the cast weights of all blocks from forward to backward, and autocast would
keep them until forward ends. The weights that they are cast from are gathered again when backward
comes to the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_VIEWS = {
    "TBackward0",
    "ViewBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "UnsafeViewBackward0",
}
_CAST = "ToCopyBackward0"


class _Recasting(nn.Module):
    """A block under autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block's own forward, and keep none of its cast weights."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
                return super().forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()


def recast_weights(block: nn.Module) -> None:
    """Let a block's backward cast its weights again. The block stays the same object."""
    kind = type(block)
    name = f"Recasting{kind.__name__}"
    block.__class__ = type(name, (_Recasting, kind), {"__module__": kind.__module__})


@dataclass
class _Cast:
    """A view of a weight in another format.

    Attributes:
        weight: the parameter, whose memory is filled again before backward.
        dtype: the format.
        layout: shape, strides and offset of the view.
    """

    weight: torch.Tensor
    dtype: torch.dtype
    layout: tuple[Any, ...]


def _packed(tensor: torch.Tensor) -> torch.Tensor | _Cast:
    """Return what autograd keeps of a tensor: a reference to the weight that it was cast from.

    A tensor that was made otherwise is kept itself.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _CAST:
        return tensor

    cast_from = node.next_functions[0][0]
    weight = getattr(cast_from, "variable", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_contiguous():
        return tensor
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return _Cast(weight, tensor.dtype, layout)


def _unpacked(kept: torch.Tensor | _Cast) -> torch.Tensor:
    """Return the tensor that autograd has kept, cast again where it was a weight's."""
    if isinstance(kept, torch.Tensor):
        return kept
    cast = kept.weight.detach().to(kept.dtype)
    return cast.as_strided(*kept.layout)
