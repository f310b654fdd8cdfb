"""Dropout and attention, written out so that they draw their masks from a given generator.

PyTorch's own take no generator, and have too many operators below them for each to be watched. Each
function here computes the same with the same calls in the same order as PyTorch does on the CPU, so
that from one state of a generator the same bits come. It takes a function that gives the generator,
and the arguments of the function that it stands for; it gives NotImplemented in cases that are not
written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Generator = Callable[[], torch.Generator]


def _dropout(
    generator: Generator,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """Compute dropout of single elements, in any shape."""
    if not training or not 0 < p < 1 or not input.is_cpu:
        return NotImplemented
    noise = _noise(generator, input, p)
    return input.mul_(noise) if inplace else input * noise


def _noise(generator: Generator, like: Tensor, p: float) -> Tensor:
    """Give what dropout multiplies by: 0 with probability p, else 1 / (1 - p)."""
    return torch.empty_like(like).bernoulli_(1 - p, generator=generator()).div_(1 - p)


def _attention(
    generator: Generator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute attention with a mask. query: (..., length, width); key, value: (..., source, width).

    With dropout the CPU has no fused kernel. This is what it does instead, step by step: both sides
    take the root of the scale, and a row in which all is masked gives zeros.
    """
    if not 0 < dropout_p < 1 or not query.is_cpu:
        return NotImplemented
    if enable_gqa or (is_causal and attn_mask is not None):
        return NotImplemented
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    if scale < 0:
        return NotImplemented

    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query = query.float()
        key = key.float()
        value = value.float()
    root = math.sqrt(scale)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores + _added(attn_mask, scores.dtype)
    weights = torch._safe_softmax(scores, -1)
    weights = weights * _noise(generator, weights, dropout_p)
    return (weights @ value).to(dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Give what a mask adds to scores: minus infinity where a boolean one is False.

    mask: (..., length, source).
    """
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf)


WRITTEN: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
"""The functions here, by the function that each stands for."""
