"""Weights in several files with an index, as Hugging Face's models have them.

::

    model.safetensors.index.json      {"metadata": {"total_size": 9876}, "weight_map": {NAME: FILE, ...}}
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors

They are copied from a run's file tensor by tensor, so a model that no process holds is divided too.

Source: https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.checkpoint.checksummed_file import write_tensors
from lockstep.checkpoint.weights import TREE, refuse_damaged
from lockstep.errors import FolderError, InputError, NotEqual, error_line
from lockstep.export.exportable import converted


def write_parts(weights: Path, path: Path, most: int, dtype: torch.dtype | None = None) -> Path:
    """Write the weights of a file to several; gives the path of their index.

    Args:
        weights: a safetensors file.
        path: what one file would be called, as ``model.safetensors``; the index and the parts are
            named after it.
        most: bytes of a part at most, unless a tensor alone is larger.
        dtype: that of floating point numbers; None is the file's.

    Raises:
        FolderError: there is no such file, or it is damaged.
        InputError: it holds more than tensors.
        NotEqual: a part isn't as it was written.
    """
    try:
        opened = safe_open(weights, framework="pt")
    except Exception as error:
        raise FolderError(f"{weights}: not a safetensors file ({error_line(error)})") from error
    with opened as file:
        metadata = file.metadata() or {}
        beside = json.loads(metadata.get(TREE, "{}"))
        if beside:
            name = next(iter(beside))
            raise InputError(f'{weights} also holds "{name}", which is no tensor of this format')
        kept = {}
        for name in file.keys():  # noqa: SIM118 — it isn't a dict
            kept[name] = file.get_tensor(name).to("meta")
        refuse_damaged(weights, metadata, kept, file.get_tensor)
        shapes = {name: converted(tensor, dtype) for name, tensor in kept.items()}
        sizes = {name: tensor.nbytes for name, tensor in shapes.items()}
        parts = divided(sizes, most)
        places: dict[str, str] = {}
        for number, inside in enumerate(parts, start=1):
            part = path.with_name(f"{path.stem}-{number:05}-of-{len(parts):05}.safetensors")
            _write_part(part, file, {name: shapes[name] for name in inside}, dtype)
            places |= dict.fromkeys(inside, part.name)

    index = path.with_name(f"{path.name}.index.json")
    content = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": places,
    }
    index.write_text(json.dumps(content, indent=2) + "\n")
    return index


def _write_part(
    part: Path,
    file: Any,
    shapes: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Write some tensors of a file to another one, and compare them.

    Args:
        part: the file to write.
        file: the open one.
        shapes: the tensors without their values, by name.
        dtype: that of floating point numbers; None is the file's.
    """

    def value_of(name: str) -> torch.Tensor:
        return converted(file.get_tensor(name), dtype)

    write_tensors(part, shapes, {"format": "pt"}, value_of)
    with safe_open(part, framework="pt") as written:
        for name in shapes:
            if not torch.equal(written.get_tensor(name), value_of(name)):
                raise NotEqual(f'{part}: "{name}" is not as it was written')


def divided(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide names in groups of at most ``most`` bytes, in their order.

    A larger tensor has a group to itself.
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups
