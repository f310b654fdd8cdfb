"""The weighting of an update: gradients of total / n become those of total / count.

With n the samples of the global batch and (total, count) the loss of a share::

    backward runs on  total / n  every rank knows n before it starts
    gradients are     summed     over micro-batches, replicas and ranks; total and count beside them
    and multiplied by n / count  so that they are those of  sum(totals) / sum(counts)

Where nothing is cut, backward runs on total / count, as that of the mean would. The host doesn't
wait for numbers on an accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.model.losses.loss import Number


@functools.lru_cache(maxsize=64)
def scalar(
    value: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Give a number as a tensor, which is written once to a device. It mustn't be changed."""
    return torch.full((), value, dtype=dtype, device=device)


_LEAST_COUNT = 1e-30
"""What an accelerator takes for a count of 0 until the host has read it."""


def as_tensor(values: Iterable[Number], device: torch.device) -> Tensor:
    """Stack numbers in one tensor of float64; the host doesn't wait for an accelerator."""
    stacked = []
    for value in values:
        if not isinstance(value, Tensor):
            value = scalar(value, torch.float64, device)
        stacked.append(value.to(device, torch.float64))
    return torch.stack(stacked)


def backward_factor(
    total: Tensor,
    divisor: Number,
    *,
    waits: bool,
) -> Tensor:
    """Give the gradient with which the backward of ``total / divisor`` begins, at ``total``.

    This saves a small step two operators and a node of the graph.

    Args:
        total: of a loss.
        divisor: a number of samples or items.
        waits: whether the host may wait for the divisor's value.
    """
    if isinstance(divisor, Tensor) and not waits:
        here = divisor.to(total.device, non_blocking=True)
        return quotient(1.0, here, total).to(total.dtype)
    factor = 0.0
    if divisor:
        factor = 1.0 / float(divisor)
    return scalar(factor, total.dtype, total.device)


def quotient(
    number: float,
    count: Tensor,
    like: Tensor | None,
) -> Tensor:
    """Divide on the count's device, in float64 if ``like`` is, otherwise in float32.

    Args:
        number: is divided.
        count: the divisor.
        like: a gradient, or a total; None is one in float32.

    A count of 0 is an error that `Step.check` raises. Until then it must not spoil the parameters:
    the quotient is finite, and the gradients of a total over nothing stay 0.
    """
    wide = torch.float32
    if like is not None and like.dtype == torch.float64:
        wide = torch.float64
    least: float = 1
    if count.is_floating_point():
        least = _LEAST_COUNT
    divisor = count.clamp_min(least)
    return (scalar(number, wide, count.device) / divisor).to(wide)


def weight(
    parameters: Sequence[nn.Parameter],
    size: int,
    count: Number,
    *,
    waits: bool,
) -> None:
    """Make the gradients of total / ``size`` those of total / ``count``.

    Args:
        parameters: have the gradients, perhaps on several devices.
        size: the samples of the global batch.
        count: the items that the loss counted.
        waits: whether the host may wait for the value of the count.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    factor: Number
    if isinstance(count, Tensor) and not waits:
        double = next((grad for grad in grads if grad.dtype == torch.float64), None)
        factor = quotient(size, count, double)
    else:
        factor = size / float(count)
    for device in dict.fromkeys(grad.device for grad in grads):
        _scale([grad for grad in grads if grad.device == device], factor, device)


def _scale(
    grads: list[Tensor],
    factor: Number,
    device: torch.device,
) -> None:
    """Multiply gradients on one device in place."""
    if isinstance(factor, Tensor):
        factor = factor.to(device, non_blocking=True)
    if all(grad.layout == torch.strided for grad in grads):
        torch._foreach_mul_(grads, factor)
        return
    for grad in grads:
        grad.mul_(factor)
