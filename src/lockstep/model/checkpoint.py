"""What a run keeps on disk, under one-device names, so that any strategy can take it up.

``model.safetensors`` and ``best.safetensors`` hold weights alone; ``state.pt`` is all that a training needs to go on.
Each file is written beside its place and then moved there, so a crash or a full disk leaves the one before.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import FolderError, SaveError, first_line
from lockstep.tensors.pytree import is_lazy


def save_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a state dict as safetensors, tied tensors once for each of their names.

    What that format has no place for (a module's extra state, complex128) is written as the bytes of ``torch.save``;
    the names of those are in the file's metadata.

    Raises:
        SaveError: it can't be written.
    """
    packed = [name for name, value in weights.items() if not _is_plain(value)]
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous() if _is_plain(value) else _pack(value)
        for name, value in weights.items()
    }
    metadata = {_PACKED: json.dumps(packed)} if packed else None
    _replace(path, lambda target: save_file(tensors, target, metadata))


_PACKED = "packed"


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype != torch.complex128 and value.layout == torch.strided


def _pack(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


def load_weights(path: Path) -> dict[str, Any]:
    """The weights of a run, by one-device name.

    Raises:
        FolderError: the file isn't there, or isn't one.
    """
    if not path.is_file():
        if path.name == "best.safetensors" and path.with_name("model.safetensors").is_file():
            raise FolderError(f"{path}: there are no best weights, since the run had no evaluation set: leave best out")
        others = [name for name in ("best.safetensors", "state.pt") if path.with_name(name).is_file()]
        what = "--best takes the best so far, --resume resumes the run" if others else "it finished no epoch"
        raise FolderError(f"{path}: there are no such weights, the run did not reach its end: {what}")
    try:
        with safe_open(path, framework="pt") as file:
            packed = json.loads((file.metadata() or {}).get(_PACKED, "[]"))
            return {
                name: _unpack(file.get_tensor(name)) if name in packed else file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 — it isn't a dict
            }
    except Exception as error:
        raise FolderError(f"{path}: not a safetensors file ({error})") from error


def take_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a run.

    Raises:
        FolderError: they aren't there, or another model's (the first name is given).
    """
    weights = load_weights(path)
    own = model.state_dict()
    for name in sorted(own.keys() ^ weights.keys()):
        where = "the run" if name in weights else "this job's model"
        raise FolderError(f'{path}: these are the weights of another model: "{name}" is in {where} only')
    for name, value in own.items():
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            continue
        if value.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)} in the run, {tuple(value.shape)} in this job's"
            raise FolderError(f'{path}: these are the weights of another model: "{name}" is {shapes}')
    model.load_state_dict(weights, strict=False)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write all that a training needs to go on.

    Raises:
        SaveError: it can't be written; the one before is still there.
    """
    _replace(path, lambda target: torch.save(dict(state), target))


def load_state(path: Path) -> dict[str, Any]:
    """What ``save_state`` wrote, on CPU.

    Raises:
        FolderError: it isn't there, or can't be read.
    """
    if not path.is_file():
        why = "nothing was saved in that folder" if path.parent.is_dir() else "there is no such folder"
        raise FolderError(f"{path}: there is no state to resume from: {why}")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FolderError(
            f"{path}: the file is damaged, or wasn't written by Lockstep ({first_line(error)}): take another run, or "
            "begin anew"
        ) from error
    return state


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except Exception as error:
        beside.unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        # torch.save's own writer reports a full disk as "file write failed" or "unexpected pos".
        full = full or "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)
        what = "the disk is full" if full else f"{type(error).__name__}: {first_line(error)}"
        kept = f"; {path.name} of before is kept" if path.exists() else ""
        advice = f"; free some space, then {'--resume the run' if kept else 'begin anew'}" if full else ""
        raise SaveError(f"{path}: could not be written: {what}{kept}{advice}") from error
