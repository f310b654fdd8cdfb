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

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.safe_file import bytes_of, could_not_write, in_file_order, write_tensors
from lockstep.errors import FolderError
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.pytree import is_lazy
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import decoded, encoded

TREE, _SUM = "tree", "sha256"
"""Of a file's metadata: what is no tensor, as ``tensors.state_tree`` gives it, and the sum of
all.
"""

EXTRA_STATE = "_extra_state"
"""PyTorch's name of a module's extra state in a state dict, after the name of the module."""

_SHOWN = 5
"""Names that a line has at most."""


def is_extra_state(name: str) -> bool:
    """Whether a name of a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def weights_on_cpu(weights: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict that later updates leave alone."""
    return {
        n: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v
        for n, v in weights.items()
    }


def save_weights(
    path: Path,
    weights: Mapping[str, Any],
    *,
    joined: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    writes: bool = True,
) -> None:
    """Write a state dict as safetensors, tied tensors once for each of their names.

    What that format has no place for (a module's extra state, complex numbers) is in the file's
    metadata, as ``tensors.state_tree`` gives it. Tensors of which ranks have some rows each are put
    together one at a time.

    Args:
        path: the file.
        weights: by name; of a tensor of which ranks have some rows each, this rank's.
        joined: gives the whole of such a tensor by its name and this rank's rows; every rank calls
            it.
        writes: else this rank only takes part in that.

    Raises:
        SaveError: it can't be written; the one before is still there.
        InputError: an extra state can't be written.
    """
    plain = {name: value for name, value in weights.items() if _is_plain(value)}
    tree, others = encoded({name: value for name, value in weights.items() if name not in plain})
    shards = {
        name: value for name, value in (plain | others).items() if isinstance(value, RowShard)
    }

    def put_together(name: str) -> torch.Tensor:
        assert joined is not None
        return joined(name, shards[name].local)

    if not writes:  # for the sum, then for the file
        for name in [*sorted(shards), *in_file_order(shards)]:
            put_together(name)
        return
    rest = {
        name: _for_a_file(value) for name, value in (plain | others).items() if name not in shards
    }
    tensors = rest | shards

    def whole(name: str) -> torch.Tensor:
        return rest[name] if name in rest else _for_a_file(put_together(name))

    beside = path.with_name(f".{path.name}.part")
    metadata = {
        "format": "pt",
        TREE: json.dumps(tree),
        _SUM: _sum_of(tensors, json.dumps(tree), whole),
    }
    try:
        write_tensors(beside, tensors, metadata, whole)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        kept = f"{path.name} of before" if path.exists() else ""
        saved = bool(CheckpointFolder(path.with_name("checkpoints")).steps())
        raise could_not_write(path, error, kept, resumable=saved) from error


def _for_a_file(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _sum_of(
    tensors: Mapping[str, torch.Tensor | RowShard], tree: str, whole: Callable[[str], torch.Tensor]
) -> str:
    """The SHA-256 of names, types, shapes and numbers, in whichever order a file has them."""
    summed = hashlib.sha256(tree.encode())
    for name, tensor in sorted(tensors.items()):
        summed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in bytes_of(whole(name)):
            summed.update(piece)
    return summed.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, RowShard):
        return value.dtype in SAFETENSORS_TYPES
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in SAFETENSORS_TYPES
        and value.layout == torch.strided
    )


def load_weights(path: Path) -> dict[str, Any]:
    """The weights of a run, by one-device name.

    Raises:
        FolderError: the file isn't there, isn't one, or isn't as it was written.
    """
    if not path.is_file():
        if path.name == "best.safetensors" and path.with_name("model.safetensors").is_file():
            raise FolderError(
                f"{path}: there are no best weights (the run had no evaluation set, or lost "
                "them): leave best out"
            )
        others = [
            name
            for name in ("best.safetensors", "checkpoints", "state.pt")
            if path.with_name(name).exists()
        ]
        what = (
            "--best takes the best so far, --resume resumes the run"
            if others
            else "it finished no epoch"
        )
        raise FolderError(
            f"{path}: there are no such weights, the run did not reach its end: {what}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it isn't a dict
            tree = metadata.get(TREE, "{}")
            others = decoded(json.loads(tree), tensors)
    except Exception as error:
        raise FolderError(f"{path}: not a safetensors file ({error})") from error
    refuse_damaged(path, metadata, tensors, tensors.__getitem__)
    return {**{n: t for n, t in tensors.items() if n.partition("/")[0] not in others}, **others}


def refuse_damaged(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    whole: Callable[[str], torch.Tensor],
) -> None:
    """Compare the sum that a file carries, if any, with that of its numbers.

    Args:
        path: the file.
        metadata: its.
        tensors: by name, with their types and shapes.
        whole: gives one by its name.

    Raises:
        FolderError: they are others.
    """
    if metadata.get(_SUM, now := _sum_of(tensors, metadata.get(TREE, "{}"), whole)) != now:
        raise FolderError(
            f"{path}: the file is damaged: its numbers aren't those that were written: take "
            "another copy of it"
            + (
                ", or --resume the run, which writes it anew"
                if path.name == "model.safetensors"
                else ""
            )
        )


def sum_in_place_of(weight: torch.Tensor) -> str:
    """The SHA-256 that a state dict has in the place of a weight that the job builds itself
    (``save_frozen=False``).

    It is that of the values, which a job's ``precision`` may hold in a wider format.
    """
    value = weight.detach().to("cpu")
    if value.is_floating_point() and torch.equal(narrow := value.float(), value):
        value = narrow
    return _sum_of({"": value}, "", lambda name: value.contiguous())


def with_own(
    weights: Mapping[str, Any],
    own: Mapping[str, Any],
    source: str,
    sum_of: Callable[[str, Any], str] = lambda name, value: sum_in_place_of(value),
) -> dict[str, Any]:
    """Weights that were saved, those that were left out taken from a model's ``own`` state dict.

    Raises:
        FolderError: that one has other values than the run had.
    """
    found = dict(weights)
    for name, value in weights.items():
        its = own.get(name)
        if isinstance(value, str) and isinstance(its, torch.Tensor | RowShard):
            if (isinstance(its, torch.Tensor) and is_lazy(its)) or sum_of(name, its) != value:
                raise FolderError(
                    f'{source}: "{name}" was frozen and is not in it (save_frozen), and the job '
                    "builds other values "
                    "now than when it was trained: give it the same pretrained weights"
                )
            found[name] = its
    return found


def take_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file.

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
    """What weights don't have of a model's ``own``, have in another shape, or beyond it: a line
    each; and what fits.

    A weight that is tied to one that is there needn't be.
    """
    fitting = {
        name: value for name, value in weights.items() if name in own and _is_like(value, own[name])
    }
    tied = {_place(own[name]) for name in fitting} - {None}
    others = [name for name in weights if name in own and name not in fitting]
    missing = [name for name in own if name not in weights and _place(own[name]) not in tied]
    missing = [name for name in missing if not is_extra_state(name)]  # (each replica had its own)
    kinds = {
        f"not in {source}": missing,
        f"of another shape in {source}": [
            f"{n} {_shape(weights[n])}, not {_shape(own[n])}" for n in others
        ],
        f"not of this model in {source}": [name for name in weights if name not in own],
    }
    return [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names], fitting


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not is_lazy(value) else None


def _is_like(value: Any, own: Any) -> bool:
    return _shape(own) in (None, _shape(value))  # of a lazy one any shape


def _place(value: Any) -> tuple[Any, ...] | None:
    """The same for tensors that are one."""
    if not isinstance(value, torch.Tensor) or is_lazy(value) or value.is_meta or not value.numel():
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
