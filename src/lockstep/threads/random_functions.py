"""Masks: the functions that draw inside of themselves, written out so that they draw from a given
generator.

PyTorch's dropout, attention and recurrent layers take no generator. Each function here computes the
same as one of them, with the same calls in the same order on the CPU, so that from one state of a
generator the same bits come. The first argument is the generator, the second the function that is
replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Generator = torch.Generator


def _kept(generator: Generator, noise: Tensor, p: float) -> Tensor:
    """Ones with probability 1 - p, else zeros, in place of ``noise``."""
    return noise.bernoulli_(1 - p, generator=generator)


def _checked(p: float) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")


def _channels(input: Tensor) -> Tensor:
    """Room for one number per sample and channel. input: (batch, channels, ...)."""
    if input.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return input.new_empty((*input.shape[:2], *(1 for _ in input.shape[2:])))


def _scale(
    generator: Generator, input: Tensor, p: float, train: bool, per_channel: bool
) -> Tensor | None:
    """What dropout multiplies by, or None for one that does nothing."""
    _checked(p)
    if p == 0 or not train or input.numel() == 0:
        return None
    if p == 1:
        return torch.zeros((), dtype=input.dtype)
    noise = _channels(input) if per_channel else torch.empty_like(input)
    return _kept(generator, noise, p).div_(1 - p)


def _dropping(per_channel: bool, in_place: bool) -> Callable[..., Tensor]:
    def dropout(generator: Generator, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        scale = _scale(generator, input, p, train, per_channel)
        if scale is None:
            return input
        return input.mul_(scale) if in_place else input * scale

    return dropout


def _functional_dropout(
    generator: Generator,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """``F.dropout``, which would call ``torch.dropout``: the one that is called most goes the
    short way.
    """
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return (_DROPOUT_ if inplace else _DROPOUT)(generator, func, input, p, training)


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
) -> Tensor:
    """Attention with its dropout mask. query: (..., length, width); key, value: (..., source,
    width).

    With dropout the CPU has no fused kernel. This is what it does instead, step by step: both sides
    take the root of the scale, and a row in which all is masked gives zeros.
    """
    if dropout_p == 0.0:
        output: Tensor = func(
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return output
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    signed = -root if scale is not None and scale < 0 else root
    scores = (query * signed) @ (key.transpose(-2, -1) * root)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=scores.dtype).masked_fill_(
                ~attn_mask, -math.inf
            )
        scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1)
    noise = _scale(generator, weights, dropout_p, True, False)
    return ((weights if noise is None else weights * noise) @ value).to(dtype)


def _layers(
    generator: Generator,
    func: Any,
    run: Callable[[Tensor, Any, Sequence[Tensor]], tuple[Tensor, ...]],
    input: Tensor,
    hidden: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    layers: int,
    dropout: float,
) -> tuple[Tensor, ...]:
    """A recurrent network layer by layer, with dropout between them. hidden: (layers x
    directions, batch, width).
    """
    several = not isinstance(hidden, Tensor)
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    cut = [state.chunk(layers) for state in states]
    each = len(weights) // layers
    last: list[list[Tensor]] = [[] for _ in states]
    output = input
    for layer in range(layers):
        mine = [state[layer] for state in cut]
        output, *ends = run(
            output, mine if several else mine[0], weights[layer * each : (layer + 1) * each]
        )
        for kept, end in zip(last, ends, strict=True):
            kept.append(end)
        if layer < layers - 1:
            scale = _scale(generator, output, dropout, True, False)
            output = output if scale is None else output * scale
    return output, *(torch.cat(kept) for kept in last)


def _recurrent(generator: Generator, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """``torch._VF.lstm`` and its like, in both of their forms: a padded batch, or packed data
    and its batch sizes.
    """
    if isinstance(args[3], (list, tuple)):
        input, sizes, hidden, weights, bias, layers, dropout, train, both_ways = args

        def run(x: Tensor, h: Any, w: Sequence[Tensor]) -> tuple[Tensor, ...]:
            ran: tuple[Tensor, ...] = func(x, sizes, h, w, bias, 1, 0.0, train, both_ways)
            return ran
    else:
        input, hidden, weights, bias, layers, dropout, train, both_ways, batch_first = args

        def run(x: Tensor, h: Any, w: Sequence[Tensor]) -> tuple[Tensor, ...]:
            ran: tuple[Tensor, ...] = func(x, h, w, bias, 1, 0.0, train, both_ways, batch_first)
            return ran

    if not train or dropout == 0 or layers == 1:
        whole: tuple[Tensor, ...] = func(*args)
        return whole
    return _layers(generator, func, run, input, hidden, weights, layers, dropout)


_DROPOUT = _dropping(per_channel=False, in_place=False)
_DROPOUT_ = _dropping(per_channel=False, in_place=True)

WRITTEN: dict[Any, Callable[..., Any]] = {
    F.dropout: _functional_dropout,
    torch.dropout: _DROPOUT,
    torch.dropout_: _DROPOUT_,
    torch.feature_dropout: _dropping(per_channel=True, in_place=False),
    torch.feature_dropout_: _dropping(per_channel=True, in_place=True),
    torch._C._nn.scaled_dot_product_attention: _attention,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
"""What is written out here, by the function that it stands for."""
