"""Numbers that may be on an accelerator, which the host doesn't wait for unless it has to."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from lockstep.model.losses.loss import Number


def on_host(values: list[Number]) -> list[float]:
    """Read numbers from accelerators, those of one device and dtype together."""
    found = [0.0] * len(values)
    waiting: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for place, value in enumerate(values):
        if is_on_accelerator(value):
            kind = (value.device, value.dtype)
            waiting.setdefault(kind, []).append((place, value.detach().reshape(())))
        else:
            found[place] = float(value)
    for of_kind in waiting.values():
        numbers = torch.stack([scalar for _, scalar in of_kind]).tolist()
        for (place, _), number in zip(of_kind, numbers, strict=True):
            found[place] = float(number)
    return found


def is_on_accelerator(value: Number) -> TypeGuard[Tensor]:
    """Whether a number is on an accelerator."""
    return isinstance(value, Tensor) and not value.is_cpu


@functools.lru_cache(maxsize=64)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
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


def backward_factor(total: Tensor, divisor: Number, *, waits: bool) -> Tensor:
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
    factor = 1.0 / float(divisor) if divisor else 0.0
    return scalar(factor, total.dtype, total.device)


def quotient(number: float, count: Tensor, like: Tensor | None) -> Tensor:
    """Divide on the count's device, in float64 if ``like`` is, otherwise in float32.

    A count of 0 is an error that `Step.check` raises. Until then it must not spoil the parameters:
    the quotient is finite, and the gradients of a total over nothing stay 0.
    """
    wide = torch.float64 if like is not None and like.dtype == torch.float64 else torch.float32
    least = count.clamp_min(_LEAST_COUNT if count.is_floating_point() else 1)
    return (scalar(number, wide, count.device) / least).to(wide)
