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

from lockstep.launch.layout import Layout
from lockstep.prediction.output_structure import Leaf, Left, taken
from lockstep.tensors.array_file import writing
from lockstep.tensors.pytree import named_parts, parts


def write_lines(folder: Path, rank: int, form: Any, outputs: Any, size: int) -> None:
    """Add a line of JSON for each sample to the file of a rank, which is made if there is none.

    Numbers that JSON lacks become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

    Args:
        folder: of the files of all ranks.
        rank: this one.
        form: of the outputs, as ``form_of`` gives it.
        outputs: of a local batch.
        size: its samples; with 0 the outputs aren't read.

    Raises:
        InputError: these outputs are of another form.
        SaveError: they can't be written.
    """
    lines: list[str] = []
    if size:
        kept = {leaf.name: value for leaf, value in taken(form, outputs, size)}
        for row in _rows(form, kept, size):
            lines.append(_json(row) + "\n")

    path = _part(folder, rank)
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def merge(target: Path, folder: Path, layout: Layout, batches: Iterable[int]) -> None:
    """Put the lines of all ranks together, in the order of the samples.

    Args:
        target: the file to make.
        folder: of the files of all ranks.
        layout: of the ranks.
        batches: the samples of each global batch.
    """
    ranks = layout.processes
    if ranks == 1:
        _part(folder, 0).replace(target)
        return

    with contextlib.ExitStack() as stack:
        files = []
        for rank in range(ranks):
            part = _part(folder, rank).open(encoding="utf-8")
            files.append(stack.enter_context(part))
        whole = stack.enter_context(target.open("x", encoding="utf-8"))
        for size in batches:
            for file, lines in zip(files, layout.sizes(size), strict=True):
                whole.writelines(itertools.islice(file, lines))


def _part(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank}.jsonl"


def _json(value: Any) -> str:
    """Return a value as one line of JSON."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    """Return the same value with words for the numbers that JSON lacks."""
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _rows(form: Any, kept: Mapping[str, Any], size: int) -> list[Any]:
    """Return the outputs of each sample as JSON has them.

    Tensors become lists, dicts and dataclasses become objects. Inside of a list or tuple, what was
    left out is null; inside of an object it is missing.

    Args:
        form: of the outputs, or a part of it.
        kept: what is to be written, by the names of leaves.
        size: samples.
    """
    if isinstance(form, Left):
        return [None] * size
    if isinstance(form, Leaf):
        rows: list[Any] = _plain(kept[form.name])
        return rows
    if not _is_by_name(form):
        columns = [_rows(part, kept, size) for part in parts(form) or ()]
        return [list(row) for row in zip(*columns, strict=True)]

    objects: list[dict[str, Any]] = [{} for _ in range(size)]
    for key, part in named_parts(form):
        if isinstance(part, Left):
            continue
        column = _rows(part, kept, size)
        for one, value in zip(objects, column, strict=True):
            one[key] = value

    return objects


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; a complex number is a pair."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj()
        if value.is_complex():
            value = torch.view_as_real(value)
        return value.tolist()

    inside = parts(value)
    if inside is None:
        is_json = isinstance(value, bool | int | float | str | None)
        return value if is_json else str(value)
    if _is_by_name(value):
        return {key: _plain(part) for key, part in named_parts(value)}
    return [_plain(part) for part in inside]


def _is_by_name(nest: Any) -> bool:
    """Return whether the parts of a nest have names, rather than numbers."""
    if isinstance(nest, tuple):
        return hasattr(nest, "_fields")
    return not isinstance(nest, list)
