"""Files of weights alone, under one-device names: ``model.safetensors`` and ``best.safetensors``.

Each carries the SHA-256 of its names and numbers, which is checked where they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lockstep.checkpoint.checksummed_file import bytes_of, could_not_write, write_tensors
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.errors import FolderError
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.pytree import is_lazy
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import decoded, encoded

TREE = "tree"
"""The key of a file's metadata for what is no tensor, as ``tensors.state_tree`` gives it."""

_SUM = "sha256"
"""The key for the hash of all names and numbers."""

EXTRA_STATE = "_extra_state"
"""PyTorch's name of a module's extra state in a state dict, after the name of the module."""

_SHOWN = 5
"""Names that a line has at most."""


def is_extra_state(name: str) -> bool:
    """Return whether a name of a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def weights_on_cpu(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict that later updates leave alone."""
    copied = dict(weights)
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            copied[name] = value.detach().to("cpu", copy=True)
    return copied


def save_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a state dict as safetensors, tied tensors once for each of their names.

    What that format has no place for (a module's extra state, complex numbers) is in the file's
    metadata, as ``tensors.state_tree`` gives it.

    Args:
        path: the file.
        weights: by name.

    Raises:
        SaveError: it can't be written; the one before is still there.
        InputError: an extra state can't be written.
    """
    plain, tree = _encoded(weights)
    tensors = {}
    for name, tensor in plain.items():
        tensors[name] = tensor.detach().to("cpu").contiguous()
    text = json.dumps(tree)
    summed = _sum_of(tensors, text)
    beside = path.with_name(f".{path.name}.part")
    try:
        write_tensors(beside, tensors, {"format": "pt", TREE: text, _SUM: summed})
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        kept = f"{path.name} of before" if path.exists() else ""
        saved = bool(CheckpointFolder(path.with_name("checkpoints")).steps())
        raise could_not_write(path, error, kept, resumable=saved) from error


def _encoded(weights: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the tensors that safetensors has a place for, and a tree of all else."""
    plain = {}
    others = {}
    for name, value in weights.items():
        if _is_plain(value):
            plain[name] = value
        else:
            others[name] = value
    tree, tensors = encoded(others)
    return plain | tensors, tree


def _sum_of(tensors: Mapping[str, torch.Tensor], tree: str) -> str:
    """Return the SHA-256 of names, types, shapes and numbers, in whichever order a file has them."""
    summed = hashlib.sha256(tree.encode())
    for name, tensor in sorted(tensors.items()):
        summed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in bytes_of(tensor):
            summed.update(piece)
    return summed.hexdigest()


def _is_plain(value: Any) -> bool:
    """Return whether safetensors has a place for a value."""
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return False
    return isinstance(value, torch.Tensor) and value.dtype in SAFETENSORS_TYPES


def load_weights(path: Path) -> dict[str, Any]:
    """Read the weights of a run, by one-device name.

    Raises:
        FolderError: the file is missing, is no file of weights, or is damaged.
    """
    if not path.is_file():
        raise FolderError(f"{path}: {_why_not_there(path)}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it isn't a dict
        others = decoded(json.loads(metadata.get(TREE, "{}")), tensors)
    except Exception as error:
        raise FolderError(f"{path}: not a safetensors file ({error})") from error
    _refuse_damaged(path, metadata, tensors)
    for name in list(tensors):
        if name.partition("/")[0] in others:
            del tensors[name]
    return {**tensors, **others}


def _why_not_there(path: Path) -> str:
    """Explain why a run has no such weights, and what to do."""
    if path.name == "best.safetensors" and path.with_name("model.safetensors").is_file():
        return (
            "there are no best weights (the run had no evaluation set, or lost them): leave best "
            "out"
        )
    what = "it finished no epoch"
    if any(path.with_name(name).exists() for name in ("best.safetensors", "checkpoints")):
        what = "--best takes the best so far, --resume resumes the run"
    return f"there are no such weights, since the run was not finished: {what}"


def _refuse_damaged(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Compare the hash that a file carries, if any, with that of its numbers.

    Args:
        path: the file.
        metadata: of the file.
        tensors: by name.

    Raises:
        FolderError: the numbers are others.
    """
    written = metadata.get(_SUM)
    if written is None or written == _sum_of(tensors, metadata.get(TREE, "{}")):
        return
    is_last = path.name == "model.safetensors"
    again = ", or --resume the run, which writes it anew" if is_last else ""
    raise FolderError(
        f"{path}: the file is damaged (the checksum does not match): use another copy{again}"
    )


def sum_in_place_of(weight: torch.Tensor) -> str:
    """Return the SHA-256 that stands for a weight in a state dict, where the job builds the weight
    itself (``save_frozen=False``).

    It is that of the values, which a job's ``precision`` may hold in a wider format.
    """
    value = weight.detach().to("cpu")
    if value.is_floating_point():
        narrow = value.float()
        if torch.equal(narrow, value):
            value = narrow
    return _sum_of({"": value.contiguous()}, "")


def with_own(
    weights: Mapping[str, Any],
    own: Mapping[str, Any],
    source: str,
    sum_of: Callable[[str, Any], str] = lambda name, value: sum_in_place_of(value),
) -> dict[str, Any]:
    """Add to saved weights the frozen ones that were left out (``save_frozen=False``).

    Args:
        weights: as they were saved; of one that was left out its SHA-256.
        own: the state dict of the model that the job builds now.
        source: what the weights are from, for messages.
        sum_of: gives the SHA-256 of a weight by its name and value.

    Raises:
        FolderError: the model has other values than the run had.
    """
    found = dict(weights)
    for name, value in weights.items():
        built = own.get(name)
        if not isinstance(value, str) or not isinstance(built, torch.Tensor | RowShard):
            continue
        has_no_value = isinstance(built, torch.Tensor) and is_lazy(built)
        if has_no_value or sum_of(name, built) != value:
            raise FolderError(
                f'{source}: "{name}" was frozen and not saved (save_frozen), and the job now '
                "builds other values than in the training: give it the same pretrained weights"
            )
        found[name] = built
    return found


def take_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file.

    Args:
        model: gets them.
        path: of the file.

    Raises:
        FolderError: they aren't there, or another model's.
    """
    own = model.state_dict()
    weights = with_own(load_weights(path), own, str(path))
    lines, _ = misfits(own, weights, "the file")
    if lines:
        raise FolderError(f"{path}: these are the weights of another model: {'; '.join(lines)}")
    model.load_state_dict(weights, strict=False)


def misfits(
    own: Mapping[str, Any], weights: Mapping[str, Any], source: str
) -> tuple[list[str], dict[str, Any]]:
    """Compare weights with those of a model.

    A weight that is tied to one that is there needn't be.

    Args:
        own: the model's state dict.
        weights: by name.
        source: what the weights are from, for the lines.

    Returns:
        A line each for what is missing, has another shape, or isn't the model's; and what fits.
    """
    fitting: dict[str, Any] = {}
    others: list[str] = []
    for name, value in weights.items():
        if name not in own:
            continue
        shape = _shape(own[name])
        if shape is None or shape == _shape(value):
            fitting[name] = value
        else:
            others.append(f"{name} {_shape(value)}, not {shape}")
    tied = {_place(own[name]) for name in fitting} - {None}
    missing = []
    for name, value in own.items():
        is_tied = _place(value) in tied
        if name not in weights and not is_tied and not is_extra_state(name):
            missing.append(name)  # (each replica had an extra state of its own)

    kinds = {
        "not in": missing,
        "of another shape in": others,
        "not of this model in": [name for name in weights if name not in own],
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            lines.append(f"{kind} {source}: {_listed(names)}")
    return lines, fitting


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None of anything else, and of a lazy one, which takes any
    shape.
    """
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return None
    return tuple(value.shape)


def _place(value: Any) -> tuple[Any, ...] | None:
    """Return the memory of a tensor, by which tied ones are found."""
    if _shape(value) is None or value.is_meta or not value.numel():
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()


def _listed(names: Sequence[str]) -> str:
    """Return names, the end of many left out."""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
