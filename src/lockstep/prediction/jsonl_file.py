"""JSON lines that several ranks write: each its own part, merged in the order of the samples at the
end.

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.prediction.output_structure import Leaf, Left, taken
from lockstep.tensors.array_file import writing
from lockstep.tensors.pytree import named_parts, parts
from lockstep.tensors.rows import share_sizes


def write_lines(folder: Path, rank: int, form: Any, outputs: Any, size: int) -> None:
    """Add a line of JSON for each sample. Numbers that JSON lacks become ``"NaN"``, ``"Infinity"``.

    Raises:
        InputError: these outputs are of another form.
        SaveError: they can't be written.
    """
    kept = {leaf.name: value for leaf, value in taken(form, outputs, size)} if size else {}
    lines = [_json(value) + "\n" for value in _rows(form, kept, size)] if size else []
    with writing(_part(folder, rank)), _part(folder, rank).open("a", encoding="utf-8") as file:
        file.writelines(lines)


def merge(target: Path, folder: Path, ranks: int, batches: Iterable[int]) -> None:
    """Put the lines of all ranks together, given the samples of each global batch."""
    if ranks == 1:
        _part(folder, 0).replace(target)
        return
    with contextlib.ExitStack() as stack:
        parts = [_part(folder, rank) for rank in range(ranks)]
        files = [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
        whole = stack.enter_context(target.open("x", encoding="utf-8"))
        for size in batches:
            for file, lines in zip(files, share_sizes(size, ranks), strict=True):
                whole.writelines(itertools.islice(file, lines))


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


def _rows(form: Any, kept: Mapping[str, Any], size: int) -> list[Any]:
    """The outputs of each sample as JSON has them: tensors as lists, dicts and dataclasses as
    objects.
    """
    if isinstance(form, Left):
        return [None] * size
    if isinstance(form, Leaf):
        rows: list[Any] = _plain(kept[form.name])
        return rows
    if not _is_by_name(form):
        columns = [_rows(part, kept, size) for part in parts(form) or ()]
        return [list(row) for row in zip(*columns, strict=True)]
    named = {
        key: _rows(part, kept, size)
        for key, part in named_parts(form)
        if not isinstance(part, Left)
    }
    return [{key: column[i] for key, column in named.items()} for i in range(size)]


def _plain(value: Any) -> Any:
    """A value as JSON has it; a complex number is a pair."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj()
        if value.is_complex():
            value = torch.view_as_real(value)
        return value.tolist()
    inside = parts(value)
    if inside is None:
        return value if isinstance(value, bool | int | float | str | None) else str(value)
    if _is_by_name(value):
        return {key: _plain(part) for key, part in named_parts(value)}
    return [_plain(part) for part in inside]


def _is_by_name(nest: Any) -> bool:
    return not isinstance(nest, list) and (not isinstance(nest, tuple) or hasattr(nest, "_fields"))
