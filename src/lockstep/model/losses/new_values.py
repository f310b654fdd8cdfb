"""New values: of a batch, those that no sample had before. What a loss does with them only, it
may do from now on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.tensors.pytree import parts, tensors
from lockstep.tensors.rows import has_rows, holds_samples

_VALUES = 10_000
"""Of a tensor, up to which new ones are looked at: more are no classes."""

_ELEMENTS = 4096
"""Of a floating tensor, up to which whole numbers are looked at."""

_NARROW = 32
"""Columns, up to which each has values of its own."""

_COLUMNS = 8
"""Of whole numbers, up to which it is also looked at what goes together (a class of a group)."""


class NewValues:
    """What targets, and whole numbers among outputs, have had: whole numbers, NaN, and the
    smallest and the largest.
    """

    def __init__(self) -> None:
        self._values: dict[str, set[Any]] = {}
        self._ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, outputs: Any, targets: Any, samples: int) -> bool:
        """Whether a batch has a value that none had before it: of a class, a flag, beyond a
        threshold.
        """
        flags = [t for t in tensors(outputs) if not t.is_floating_point() or t.numel() == samples]
        named = [(f"output {place}", t) for place, t in enumerate(flags) if has_rows(t, samples)]
        named += _named(targets, samples, "target")
        found = [its for name, leaf in named for its in self._of(name, leaf, samples)]
        columns = [
            t.reshape(samples, -1)
            for _, t in named
            if isinstance(t, Tensor) and _is_class(t, samples)
        ]
        if 1 < sum(its.shape[1] for its in columns) <= _COLUMNS:
            rows = torch.cat([its.cpu().long() for its in columns], 1).tolist()
            found.append(self._has_new("rows", set(map(tuple, rows))))
        return any(found)

    def _of(self, name: str, leaf: Any, samples: int) -> Iterator[bool]:
        if not isinstance(leaf, Tensor):
            yield self._has_new(name, {leaf})
            return
        if not leaf.numel() or leaf.is_complex():
            return
        if leaf.is_floating_point():
            yield self._is_beyond(name, leaf, samples)
        if leaf.is_floating_point() and leaf.numel() > _ELEMENTS:
            yield self._has_new(name, {bool(leaf.isnan().any())})
            return
        yield self._has_new(name, set(map(_whole, torch.unique(leaf).tolist())))
        if has_rows(leaf, samples) and samples < leaf.numel() <= samples * _NARROW:
            rows = leaf.reshape(samples, -1).tolist()
            by_column = {
                (column, _whole(value)) for row in rows for column, value in enumerate(row)
            }
            yield self._has_new(f"{name} columns", by_column)

    def _has_new(self, name: str, now: set[Any]) -> bool:
        seen = self._values.setdefault(name, set())
        if len(seen) > _VALUES:
            return False
        is_new = not now <= seen
        seen |= now
        return is_new

    def _is_beyond(self, name: str, tensor: Tensor, samples: int) -> bool:
        wide = not has_rows(tensor, samples) or tensor.numel() > samples * _COLUMNS
        rows = tensor.nan_to_num().reshape(
            -1 if wide else samples, 1 if wide else tensor[0].numel()
        )
        low, high = rows.aminmax(dim=0)
        if name not in self._ranges or self._ranges[name][0].shape != low.shape:
            self._ranges[name] = low, high
            return True
        least, most = self._ranges[name]
        self._ranges[name] = torch.minimum(least, low), torch.maximum(most, high)
        return bool(((low < least) | (high > most)).any())


def _named(nest: Any, samples: int, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors, texts and Python's numbers by their places; what the samples of a list have there
    has one name.
    """
    if isinstance(nest, Tensor | str | int | float):
        yield name, nest
        return
    alike = isinstance(nest, list | tuple) and holds_samples(nest, samples)
    for place, part in enumerate(parts(nest) or ()):
        yield from _named(part, samples, f"{name}.{'' if alike else place}")


def _is_class(tensor: Tensor, samples: int) -> bool:
    return has_rows(tensor, samples) and not (tensor.is_floating_point() or tensor.is_complex())


def _whole(value: float) -> float | None:
    """A number that is whole; 0.5 for any other, and None for NaN."""
    return None if value != value else value if value % 1 == 0 else 0.5
