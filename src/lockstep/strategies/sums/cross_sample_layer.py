"""The first layer in which the samples of a batch act on one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.snapshot import Snapshot
from lockstep.strategies.sums.sums_of_pieces import Piece
from lockstep.tensors.pytree import tensors

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far rows may lie apart, as a part of the largest number."""

_Calls = dict[str, list[tuple[list[Tensor], list[Tensor]]]]
"""By module, in the order in which they end: the tensors that each call was given, and gave."""


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
    found: list[_Calls] = []
    for piece in (whole, last):
        snapshot.put_back()
        found.append(_calls(model, compute_outputs, piece))
    of_whole, of_last = found
    for module, calls in of_whole.items():
        for one, other in zip(calls, of_last.get(module, []), strict=False):
            given, gave = (_differ(*nests, whole, last) for nests in zip(one, other, strict=True))
            if gave and not given:
                return f"samples influence one another in {module}"
    return ""


def _calls(
    model: nn.Module,
    compute_outputs: Callable[[Piece], Any],
    piece: Piece,
) -> _Calls:
    """Find the calls of modules in forward."""
    calls: _Calls = {}

    def note(
        words: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        outputs: Any,
    ) -> None:
        calls.setdefault(words, []).append((_floats((args, kwargs)), _floats(outputs)))

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
    return [tensor.detach() for tensor in tensors(nest) if tensor.is_floating_point()]


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
        apart = (one.narrow(0, part.start, size) - other).abs().max()
        if not apart <= _TOLERANCE.get(other.dtype, 5e-2) * other.abs().max():
            return True
    return False
