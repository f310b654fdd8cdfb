"""Outputs over a batch beside those over parts of it: what an output without a row for each
sample is.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from lockstep.model.inspection.findings import Kind
from lockstep.model.inspection.rounding import differ
from lockstep.tensors.pytree import each, named_tensors
from lockstep.tensors.rows import has_rows


def with_own(own: Any, names: Container[str], outputs: Any) -> Any:
    """Outputs, of which those of these names are a part's own."""
    its = iter([tensor if name in names else None for name, tensor in named_tensors(own)])
    return each(lambda tensor: tensor if (mine := next(its)) is None else mine, outputs)


def totals_of(made: Any) -> list[torch.Tensor]:
    """The total of a loss, and those of its parts."""
    return [made[0], *(total for _, total in sorted(_parts_of(made).items()))]


def bent_parts(whole: Any, one: Any, other: Any) -> tuple[str, ...]:
    """The names of parts of a loss, "" for all of it, whose total over a batch is not the sum of
    those of parts.
    """
    every, first, rest = ({"": of[0], **_parts_of(of)} for of in (whole, one, other))
    both = {name: first[name] + rest[name] for name in every if name in first and name in rest}
    return tuple(name for name, total in both.items() if differ([every[name]], [total]))


def _parts_of(made: Any) -> dict[str, torch.Tensor]:
    """Their totals; what Python's numbers were computed in isn't known."""
    totals = ((name, total) for name, (total, _) in getattr(made, "parts", {}).items())
    tensors = (
        (n, t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=torch.float32))
        for n, t in totals
    )
    return {n: t if t.is_floating_point() else t.double() for n, t in tensors}


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real ones, another as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def cropped(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows as long as the shortest, in each dimension."""
    sizes = [min(column) for column in zip(*(t.shape[1:] for t in tensors), strict=True)]
    return [t[(slice(None), *(slice(size) for size in sizes))] for t in tensors]


def has_shorter_rows(one: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> bool:
    """Whether a row of one sample is shorter than those of all samples."""
    both = [(t, whole[name]) for name, t in one.items() if name in whole and has_rows(t, 1)]
    return any(
        t.dim() == of.dim() and any(map(int.__lt__, t.shape[1:], of.shape[1:])) for t, of in both
    )


def rows_of(outputs: dict[str, torch.Tensor], samples: int) -> list[torch.Tensor]:
    """The outputs with a row for each sample."""
    return [t for t in outputs.values() if has_rows(t, samples)]


def kind_of(whole: torch.Tensor, head: torch.Tensor, tail: torch.Tensor, part: float) -> Kind:
    """What an output over a batch is to those over its first ``part`` and the rest."""
    if not any(map(torch.any, (whole, head, tail))):  # as it may be before the first update
        return "sum"
    if not differ([whole, whole], [head, tail]):
        return "same"
    if not differ([whole], [head + tail]):
        return "sum"
    return "neither" if differ([whole], [part * head + (1 - part) * tail]) else "mean"
