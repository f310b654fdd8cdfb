"""Weights that autocast casts in a block's forward aren't kept for backward, which casts them
again.

Autograd would keep the cast weights of all blocks from forward to backward, and autocast would
keep them until forward ends. The weights that they are cast from are gathered again when backward
comes to the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def recast_weights(block: nn.Module) -> None:
    """Let a block's backward cast its weights again."""
    forward = block.forward

    @functools.wraps(forward)
    def recasting(*args: Any, **kwargs: Any) -> Any:
        """Call the block's own forward, and keep none of its cast weights."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
                return forward(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    block.forward = recasting


def _packed(tensor: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
    """Return what autograd keeps of a tensor: what casts the weight again that it was cast from.

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
    dtype = tensor.dtype
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
    # The weight's memory is filled again before backward.
    return lambda: weight.detach().to(dtype).as_strided(*layout)


def _unpacked(kept: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the tensor that autograd has kept, cast again where it was a weight's."""
    return kept if isinstance(kept, torch.Tensor) else kept()
