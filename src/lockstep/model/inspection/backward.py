"""Backward: whether gradients over a batch are the sum of those over parts of it, and what it
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.model.inspection.attributes import acting_buffers, attribute_prints, kept_state
from lockstep.model.inspection.findings import Seen
from lockstep.model.inspection.outside_variables import OutsideVariables
from lockstep.model.inspection.rounding import differ, first_apart
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import graph_nodes
from lockstep.tensors.seeding import kept_states

_TIMES = 2.0**20
"""Backward of so many times the total gives so many times the gradients, rounding and all, where
it is linear.
"""


def see_gradients(
    model: nn.Module,
    total_of: Callable[[int, int], torch.Tensor],
    shares: tuple[tuple[int, int], ...],
    seen: Seen,
    outside: OutsideVariables,
) -> bool:
    """Find parameters whose gradient over a batch isn't the sum of those over two parts of it, or
    isn't linear.

    And what backward writes.

    Args:
        model: a copy.
        total_of: the loss of so many samples from one on, each time by a forward of its own.
        shares: the batch and its two parts: the first sample, and how many.
        seen: is told.
        outside: the variables that the model uses and doesn't own.

    Returns:
        Whether the totals don't add up.
    """
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    totals: list[torch.Tensor] = []
    found: list[list[torch.Tensor]] = []
    ends: list[dict[str, Any]] = []
    halves = False

    @outside.kept()  # else a number of calls might come to where it acts
    def gradients(start: int, size: int, times: float = 1.0) -> list[torch.Tensor]:
        nonlocal halves
        with torch.enable_grad():
            value = total_of(start, size)
        totals.append(value.detach())
        if not value.requires_grad:
            return [torch.zeros(()) for _ in parameters]
        halves = torch.float16 in {value.dtype, *(p.dtype for p in parameters)}
        begun, before = _state_prints(model), outside.prints()
        of_value = _gradients(value, parameters, times, lambda: total_of(start, size))
        ends.append(_state_prints(model))
        written = (name for name, its in ends[-1].items() if begun.get(name) != its)
        seen.backward_writes = tuple(dict.fromkeys((*seen.backward_writes, *written)))
        seen.changes = tuple(dict.fromkeys((*seen.changes, *outside.changed_since(before))))
        return of_value

    for start, size in shares:
        found.append(gradients(start, size))
    seen.backward_follows = tuple(
        n for n in seen.backward_writes if len({end.get(n) for end in ends}) > 1
    )
    if not halves and not seen.backward_writes:
        seen.nonlinear = first_apart(names, found[0], gradients(*shares[0], _TIMES))
    if apart := differ(totals[:1], [totals[1] + totals[2]]):
        return apart
    seen.backward = first_apart(names, found[0], [b + c for b, c in zip(*found[1:], strict=True)])
    return apart


def first_recomputed(
    model: nn.Module,
    total_of: Callable[[], torch.Tensor],
    without_checkpoints: Callable[[], AbstractContextManager[None]],
    accelerators: Sequence[torch.device],
) -> str | None:
    """The first parameter whose gradient is another one where blocks keep their activations."""
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    both = []
    for context in (nullcontext, without_checkpoints):
        with kept_states(accelerators), kept_state([model]), context(), torch.enable_grad():
            both.append(_gradients(total_of(), parameters, 1.0, total_of))
    return first_apart(names, both[1], both[0])


def _gradients(
    value: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    times: float,
    again: Callable[[], torch.Tensor],
) -> list[torch.Tensor]:
    """Those of so many times a total; ``again`` computes it once more."""
    begin = torch.full_like(value, times)
    try:
        found = torch.autograd.grad(value, parameters, begin, allow_unused=True)
    except RuntimeError:  # a reentrant checkpoint in the model goes with backward alone
        with torch.enable_grad():
            value = again()
        reached = (getattr(node, "variable", None) for node in graph_nodes(value))
        leaves = {id(leaf): leaf for leaf in (*reached, *parameters) if leaf is not None}
        before = [(leaf, leaf.grad) for leaf in leaves.values()]
        for leaf, _ in before:
            leaf.grad = None
        try:
            torch.autograd.backward(value, begin)
            found = tuple(p.grad for p in parameters)  # type: ignore[misc]
        finally:
            for leaf, grad in before:
                leaf.grad = grad
    return [
        torch.zeros(()) if g is None or g.layout != torch.strided else g.div(times) for g in found
    ]


def _state_prints(model: nn.Module) -> dict[str, Any]:
    """A hash of each buffer that acts in training, and of each attribute."""
    return {
        **{name: digest(b) for name, b in acting_buffers(model).items()},
        **attribute_prints(model),
    }


def comes_from_within(total: torch.Tensor, outputs: Any) -> bool:
    """Whether a loss that was given ``outputs`` without their graph comes to what forward computed
    all the same.

    (By an attribute of the model, say. The weights, which a penalty may read, are no such thing.)
    """
    inside = set(graph_nodes(outputs))
    return any(node in inside and not hasattr(node, "variable") for node in graph_nodes(total))
