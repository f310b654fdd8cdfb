"""JSON lines that several ranks write: each its own part, merged in the order of the samples at the end.

::

    rank 0   | 0 1 |     | 4 5 |          samples of batch 0, batch 1
    rank 1       | 2 3 |     | 6 |
    merged   | 0 1 | 2 3 | 4 5 | 6 |
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.tensors.array_file import writing
from lockstep.tensors.pytree import share_sizes


class LineWriter:
    """Writes the lines of one rank; each method raises a SaveError where that can't be done."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _part(folder, rank)
        with writing(self._path):
            self._file = self._path.open("x", encoding="utf-8")

    def write(self, values: Iterable[Any]) -> None:
        """Write a line of JSON for each value. Numbers that JSON lacks become ``"NaN"``, ``"Infinity"``."""
        with writing(self._path):
            for value in values:
                self._file.write(_json(value) + "\n")

    def close(self) -> None:
        """Write what is still held back."""
        with writing(self._path):
            self._file.close()


def merge(target: Path, folder: Path, ranks: int, batches: Iterable[int]) -> None:
    """Put the lines of all ranks together.

    Args:
        target: the file to make.
        folder: where the ranks' parts are.
        ranks: how many.
        batches: samples of each global batch, in order.

    Raises:
        SaveError: it can't be written.
    """
    if ranks == 1:
        _part(folder, 0).replace(target)
        return
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(_part(folder, rank).open(encoding="utf-8")) for rank in range(ranks)]
        with writing(target), target.open("x", encoding="utf-8") as whole:
            for size in batches:
                for part, lines in zip(parts, share_sizes(size, ranks), strict=True):
                    whole.writelines(itertools.islice(part, lines))


def _part(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return value
