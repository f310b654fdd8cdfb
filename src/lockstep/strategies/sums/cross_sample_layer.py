"""The first layer in which the samples of a batch act on one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.model.snapshot import Snapshot
from lockstep.strategies.sums.sums_of_pieces import Piece
from lockstep.tensors.pytree import tensors

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far rows may lie apart, as a part of the largest number."""


class _Call(NamedTuple):
    """A call of a module in forward.

    Attributes:
        given: its arguments, as far as they are floating-point tensors.
        gave: its outputs, likewise.
    """

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
    snapshot.put_back()
    of_whole = _calls(model, compute_outputs, whole)
    snapshot.put_back()
    of_last = _calls(model, compute_outputs, last)
    for call, one in of_whole.items():
        other = of_last.get(call)
        if other is None:  # the part calls it less often
            continue
        gave_other_rows = _differ(one.gave, other.gave, whole, last)
        if gave_other_rows and not _differ(one.given, other.given, whole, last):
            module, _ = call
            return f"samples influence one another in {module}"
    return ""


def _calls(
    model: nn.Module,
    compute_outputs: Callable[[Piece], Any],
    piece: Piece,
) -> dict[tuple[str, int], _Call]:
    """Find the calls of modules in forward, in the order in which they end.

    Returns:
        By the module's name and kind, and the number of its call.
    """
    calls: dict[tuple[str, int], _Call] = {}
    numbers: Counter[str] = Counter()

    def note(words: str, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        given = _floats((args, kwargs))
        calls[words, numbers[words]] = _Call(given, _floats(outputs))
        numbers[words] += 1

    hooks = []
    for path, module in model.named_modules():
        name = f'"{path}"' if path else "the model"
        words = f"{name} ({type(module).__name__})"
        hook = module.register_forward_hook(partial(note, words), with_kwargs=True)
        hooks.append(hook)
    try:
        compute_outputs(piece)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _floats(nest: Any) -> list[Tensor]:
    found = []
    for tensor in tensors(nest):
        if tensor.is_floating_point():
            found.append(tensor.detach())
    return found


def _differ(
    of_whole: list[Tensor],
    of_part: list[Tensor],
    whole: Piece,
    part: Piece,
) -> bool:
    """Return whether the rows of a part are other ones where they are computed with the whole.

    Tensors that don't have a row for each sample are left out.
    """
    for one, other in zip(of_whole, of_part, strict=False):
        if not other.dim() or not other.numel():
            continue
        size, *row = other.shape
        if size != part.size or one.shape != (whole.size, *row):
            continue
        rows = one.narrow(0, part.start, part.size)
        apart = (rows - other).abs().max()
        tolerance = _TOLERANCE.get(other.dtype, 5e-2)
        bound = tolerance * other.abs().max()
        if not apart <= bound:
            return True
    return False
