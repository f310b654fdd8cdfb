"""Dropout, attention and recurrent layers, written out so that they draw their masks from a given
generator.

PyTorch's own take no generator, and have too many operators below them for each to be watched. Each
function here computes the same with the same calls in the same order as PyTorch does on the CPU, so
that from one state of a generator the same bits come. It takes a function that gives the generator,
the function that it stands for, and that one's arguments; it gives NotImplemented in cases that are
not written out.
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
    func: Any,
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
    func: Any,
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


def _recurrent(generator: Generator, func: Any, *args: Any) -> Any:
    """Compute layers of an LSTM, GRU or RNN one after the other, with dropout between them.

    The arguments are those of ``torch._VF.lstm``, in either form: input, hidden, weights, ..., or
    with the batch sizes of packed data after the input. hidden: (layers x directions, batch, width).
    """
    is_packed = isinstance(args[3], list | tuple)
    at = 3 if is_packed else 2
    hidden = args[at - 1]
    weights = args[at]
    layers, dropout, trains = args[at + 2 : at + 5]
    if not trains or dropout == 0 or layers == 1 or not args[0].is_cpu:
        return func(*args)
    if dropout == 1:
        return NotImplemented

    each = len(weights) // layers
    given = list(args)
    given[at + 2] = 1
    given[at + 3] = 0.0
    ends: list[list[Tensor]] = []
    for layer in range(layers):
        given[at - 1] = _of_layer(hidden, layer, layers)
        given[at] = weights[layer * each : (layer + 1) * each]
        output, *end = func(*given)
        ends.append(end)
        if layer < layers - 1:
            given[0] = output * _noise(generator, output, dropout)
    return output, *(torch.cat(end) for end in zip(*ends, strict=True))


def _of_layer(hidden: Any, layer: int, layers: int) -> Any:
    """Give the hidden state of one layer: of an LSTM there are two tensors."""
    if isinstance(hidden, Tensor):
        return hidden.chunk(layers)[layer]
    return [state.chunk(layers)[layer] for state in hidden]


WRITTEN: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
"""The functions here, by the function that each stands for."""
