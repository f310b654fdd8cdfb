"""Gradients as numbers, and their norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> torch.Tensor:
    """Scale gradients so that their norm together is at most ``largest``; return what it was.

    Unlike PyTorch's function it takes sparse gradients too. If ``largest`` is infinite, gradients
    stay as they are.

    Args:
        parameters: have the gradients, which are scaled in place.
        largest: the norm that all gradients together may have.
    """
    if math.isinf(largest):
        grads = [p.grad for p in parameters if p.grad is not None]
        return nn.utils.get_total_norm(
            [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        )
    grads = gradient_values(parameters)
    norm = nn.utils.get_total_norm(grads)
    scale_to_norm(grads, norm, largest)
    return norm


def gradient_values(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """List the numbers of all gradients. A sparse gradient gives its rows, each row once."""
    values = []
    for p in parameters:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad.values())
        else:
            values.append(p.grad)
    return values


def scale_to_norm(grads: Iterable[torch.Tensor], norm: torch.Tensor, largest: float) -> None:
    """Scale gradients in place so that their norm together is at most ``largest``.

    Args:
        grads: on any devices, of any dtypes.
        norm: their norm together, before.
        largest: the norm that they may have.
    """
    if math.isinf(largest):
        return
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch's clip_grad_norm_ has it
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), some in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_(some, factor.to(device, wide))
