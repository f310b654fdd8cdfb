"""Lines of JSON, one for each sample."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.prediction.output_structure import Leaf, Left, taken
from lockstep.tensors.pytree import named_parts, parts


def lines_of(form: Any, outputs: Any, size: int) -> str:
    """Write a line of JSON for each sample.

    Numbers that JSON lacks become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

    Args:
        form: of the outputs, as ``form_of`` gives it.
        outputs: of a local batch.
        size: its samples.

    Raises:
        InputError: these outputs are of another form.
    """
    columns = {leaf.name: _plain(value) for leaf, value in taken(form, outputs, size)}
    lines = []
    for row in range(size):
        lines.append(_json(_row(form, columns, row)) + "\n")
    return "".join(lines)


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


def _row(form: Any, columns: Mapping[str, Any], row: int) -> Any:
    """Return the outputs of a sample as JSON has them.

    Tensors become lists, dicts and dataclasses become objects. Inside of a list or tuple, what was
    left out is null; inside of an object it is missing.

    Args:
        form: of the outputs, or a part of it.
        columns: what is to be written, by the names of leaves.
        row: the sample.
    """
    if isinstance(form, Left):
        return None
    if isinstance(form, Leaf):
        return columns[form.name][row]
    if not _is_by_name(form):
        return [_row(part, columns, row) for part in parts(form) or ()]
    found = {}
    for key, part in named_parts(form):
        if not isinstance(part, Left):
            found[key] = _row(part, columns, row)
    return found


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
