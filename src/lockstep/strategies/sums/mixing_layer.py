"""The first layer in which the samples of a batch act on one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.model.snapshot import Snapshot
from lockstep.strategies.sums.sums_of_pieces import Piece
from lockstep.tensors.pytree import tensors

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far rows may lie apart, as a part of the largest number."""


class _Call(NamedTuple):
    """A call of a module in forward."""

    module: nn.Module
    given: list[Tensor]
    gave: list[Tensor]


def first_that_mixes(
    model: nn.Module,
    pieces: Sequence[Piece],
    compute_outputs: Callable[[Piece], Any],
    snapshot: Snapshot,
) -> str:
    """Name the first module whose outputs for the last part depend on the other samples, though
    its inputs don't; "" where there is none.

    Args:
        model: the model.
        pieces: the whole, and its parts.
        compute_outputs: calls the model with a piece.
        snapshot: of the model, which is put back before each call.
    """
    whole, *_, last = pieces
    calls = []
    for piece in (whole, last):
        snapshot.put_back()
        calls.append(_calls(model, compute_outputs, piece))
    for one, other in zip(*calls, strict=False):
        gave_other_rows = _differ(one.gave, other.gave, whole, last)
        if gave_other_rows and not _differ(one.given, other.given, whole, last):
            name = next(name for name, module in model.named_modules() if module is one.module)
            named = f'"{name}"' if name else "the model"
            return f"samples act on one another in {named} ({type(one.module).__name__})"
    return ""


def _calls(model: nn.Module, compute_outputs: Callable[[Piece], Any], piece: Piece) -> list[_Call]:
    """List the calls of modules in forward, in the order in which they end."""
    calls: list[_Call] = []

    def note(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        calls.append(_Call(module, _floats((args, kwargs)), _floats(outputs)))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        compute_outputs(piece)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _floats(nest: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors(nest) if tensor.is_floating_point()]


def _differ(of_whole: list[Tensor], of_part: list[Tensor], whole: Piece, part: Piece) -> bool:
    """Whether the rows of a part are other ones where they are computed with the whole."""
    for one, other in zip(of_whole, of_part, strict=False):
        if other.shape[:1] != (part.size,) or one.shape != (whole.size, *other.shape[1:]):
            continue
        if not other.numel():
            continue
        apart = (one.narrow(0, part.start, part.size) - other).abs().max()
        bound = _TOLERANCE.get(other.dtype, 5e-2) * other.abs().max()
        if not apart <= bound:
            return True
    return False
