"""Backward: whether gradients over a batch are the sum of those over parts of it, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.model.inspection.attributes import acting_buffers, attribute_prints
from lockstep.model.inspection.findings import Seen
from lockstep.model.inspection.rounding import differ, first_apart
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import graph_nodes

_TIMES = 2.0**20
"""Backward of so many times the total gives so many times the gradients, rounding and all, where it is linear."""


def see_gradients(
    model: nn.Module, total_of: Callable[[int, int], torch.Tensor], shares: tuple[tuple[int, int], ...], seen: Seen
) -> bool:
    """Find parameters whose gradient over a batch isn't the sum of those over two parts of it, or isn't linear.

    And what backward writes.

    Returns:
        Whether the totals don't add up, each of them computed after a forward of its own.
    """
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)

    def gradients(value: torch.Tensor, times: float = 1.0) -> list[torch.Tensor]:
        begin = torch.full_like(value, times)
        found = torch.autograd.grad(value, parameters, begin, allow_unused=True, retain_graph=enlarges and times == 1)
        return [torch.zeros(()) if g is None or g.layout != torch.strided else g.div(times) for g in found]

    totals: list[torch.Tensor] = []
    found: list[list[torch.Tensor]] = []
    ends: list[dict[str, Any]] = []
    enlarges = False
    for start, size in shares:
        with torch.enable_grad():
            value = total_of(start, size)
        totals.append(value.detach())
        begun = _state_prints(model)
        enlarges = not found and torch.float16 not in {value.dtype, *(p.dtype for p in parameters)}
        found.append(gradients(value))
        ends.append(_state_prints(model))
        written = (name for name, its in ends[-1].items() if begun.get(name) != its)
        seen.backward_writes = tuple(dict.fromkeys((*seen.backward_writes, *written)))
        if enlarges and not seen.backward_writes:  # (else the graph may hold what was written)
            seen.nonlinear = first_apart(names, found[0], gradients(value, _TIMES))
    seen.backward_follows = tuple(n for n in seen.backward_writes if len({end.get(n) for end in ends}) > 1)
    if apart := differ(totals[:1], [totals[1] + totals[2]]):
        return apart
    seen.backward = first_apart(names, found[0], [b + c for b, c in zip(*found[1:], strict=True)])
    return apart


def _state_prints(model: nn.Module) -> dict[str, Any]:
    """A hash of each buffer that acts in training, and of each attribute."""
    return {**{name: digest(b) for name, b in acting_buffers(model).items()}, **attribute_prints(model)}


def comes_from_within(total: torch.Tensor, outputs: Any) -> bool:
    """Whether a loss that was given ``outputs`` without their graph comes to what forward computed all the same.

    (By an attribute of the model, say. The weights, which a penalty may read, are no such thing.)
    """
    inside = set(graph_nodes(outputs))
    return any(node in inside and not hasattr(node, "variable") for node in graph_nodes(total))
