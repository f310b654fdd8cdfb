"""Weights to begin with: of a safetensors file, a run, or a folder as Hugging Face's models have
it.

::

    weights.safetensors
    runs/digits-ddp-20261121-093000/model.safetensors
    gpt2/model.safetensors
    llama/model.safetensors.index.json    "weight_map": each name's file, beside it
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lockstep.checkpoint.weights import load_weights, misfits, with_own
from lockstep.errors import FolderError, JobError, error_line

_INDEX = "model.safetensors.index.json"


def begin_with(model: nn.Module, source: str, *, strict: bool) -> list[str]:
    """Give a model on the CPU the weights of a file or a folder.

    Returns a line with how many they are, and one for each kind of what doesn't fit.

    Args:
        model: has the names.
        source: the path.
        strict: refuse weights that are not all of the model's, and no others. A weight that is tied
            to one that is there needn't be.

    Raises:
        JobError: nothing can be read there, none of it fits, or ``strict`` and not all does.
    """
    own = model.state_dict()
    weights = with_own(_read(Path(source)), own, f"init: {source}")
    lines, fitting = misfits(own, weights, source)
    if not fitting:
        names = f'"{next(iter(own))}", ...' if own else "none"
        theirs = f'"{next(iter(weights))}", ...' if weights else "none"
        raise JobError(
            f"init: {source} has no weight of the model: its names are {theirs}, the model's "
            f"{names}"
        )
    if lines and strict:
        raise JobError(
            f"init: {'; '.join(lines)}: --init-strict false loads the other weights, and leaves "
            "these as built"
        )
    model.load_state_dict(fitting, strict=False)
    count = f"{len(fitting)} of {len(own)} weights are from {source}"
    return [f"init: {line}" for line in (count, *lines)]


def _read(path: Path) -> dict[str, Any]:
    """Read the weights of a file or a folder.

    Raises:
        JobError: that can't be done.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        if (path / _INDEX).is_file():
            return dict(_shards(path))
        return load_weights(file)
    except JobError:
        raise
    except FolderError as error:
        raise JobError(f"init: {_why_not_there(path) or error}") from error
    except Exception as error:
        why = _why_not_there(path) or f"{path}: {error_line(error)}"
        raise JobError(f"init: {why}") from error


def _why_not_there(path: Path) -> str | None:
    """Explain why there are no weights; None where a file is there."""
    if not path.exists():
        return f"{path}: there is no such file"
    if path.is_dir() and not (path / "model.safetensors").is_file():
        return f"{path}: there is no model.safetensors and no {_INDEX} in it"
    return None


def _shards(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights of a folder with an index, file by file.

    Raises:
        JobError: the index names a file that is elsewhere.
    """
    files: dict[str, list[str]] = {}
    for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items():
        if Path(file).name != file:
            raise JobError(f"init: {folder / _INDEX} names {file}, which isn't in that folder")
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)
