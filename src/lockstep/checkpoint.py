"""What a run keeps on disk, under one-device names, so that any strategy can take it up.

``model.safetensors`` and ``best.safetensors`` hold weights alone; ``state.pt`` is all that a training needs to go on.
Each file is written beside its place and then moved there, so a crash or a full disk leaves the one before.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.errors import FolderError, SaveError


def save_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a state dict's tensors as safetensors, tied ones once for each of their names.

    Raises:
        SaveError: it can't be written.
    """
    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    }
    _replace(path, lambda target: save_file(tensors, target))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a run, by one-device name.

    Raises:
        FolderError: the file isn't there, or isn't one.
    """
    if not path.is_file():
        if path.name == "best.safetensors" and path.with_name("model.safetensors").is_file():
            raise FolderError(f"{path}: there are no best weights, since the run had no evaluation set: leave best out")
        others = [name for name in ("best.safetensors", "state.pt") if path.with_name(name).is_file()]
        what = "--best takes the best so far, --resume goes on" if others else "it had not finished an epoch"
        raise FolderError(f"{path}: there are no such weights, the run was stopped: {what}")
    try:
        return dict(load_file(path))
    except Exception as error:
        raise FolderError(f"{path}: not a safetensors file ({error})") from error


def take_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a run.

    Raises:
        FolderError: they aren't there, or another model's (the first name is given).
    """
    weights = load_weights(path)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name in sorted(own.keys() ^ weights.keys()):
        where = "the run" if name in weights else "this job's model"
        raise FolderError(f'{path}: these are the weights of another model: "{name}" is in {where} only')
    for name, value in own.items():
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
        raise FolderError(f"{path}: there is no state to resume from; the run had not finished an epoch")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FolderError(f"{path}: it can't be read ({str(error).splitlines()[0]})") from error
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
        what = "the disk is full" if full else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        kept = f"; {path.name} of before is kept" if path.exists() else ""
        advice = "; free some space, then --resume the run" if full else ""
        raise SaveError(f"{path}: could not be written: {what}{kept}{advice}") from error
