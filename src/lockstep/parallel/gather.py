"""Gather: put the outputs of several devices together again, in order.

``torch.nn.parallel.gather`` refuses CPU tensors and fails somewhere inside where the outputs differ
in structure.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.launch.devices import Device
from lockstep.parallel import target_devices
from lockstep.tensors import pytree


def gather(
    outputs: Sequence[Any],
    target_device: Device | torch.device | str | int,
    dim: int = 0,
) -> Any:
    """Put ``outputs``, one nest per device, together in one nest on ``target_device``.

    Gradients go back to where each output came from.

    Args:
        outputs: nests of one structure: tensors are joined along ``dim``; None stays None; what can
            be gone through and has tensors inside (a cache of transformers', say) is made anew, as
            ``type(output)(parts)``; anything else must be the same in all of them, and is given
            once.
        target_device: where the whole comes to lie; -1 and ``"cpu"`` are the memory of the CPU.
        dim: the dimension to join along. Tensors of 0 dimensions become a vector, with PyTorch's
            warning.

    Raises:
        InputError: structures, shapes or values that don't go together (both are shown), or no
            outputs at all.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    if not outputs:
        raise InputError("no outputs to gather: there must be one for each device that was used")
    column = list(outputs)
    place = target_devices.one(target_device)
    whole = _joined(column, place, dim, column)
    if dim == 0 and any(tensor.dim() == 0 for tensor in pytree.tensors(outputs[0])):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; "
            "will instead unsqueeze and return a vector.",
            stacklevel=2,
        )
    return whole


def _joined(column: list[Any], place: torch.device, dim: int, outputs: list[Any]) -> Any:
    first = column[0]
    if all(isinstance(item, Tensor) for item in column):
        return _concatenated(column, place, dim)
    for number, other in enumerate(column):
        if not pytree.same_kind(first, other):
            raise InputError(
                "outputs of different structure can't be gathered: device 0 gave "
                f"{pytree.described(outputs[0])}, device {number} "
                f"{pytree.described(outputs[number])}"
            )
    inside = [pytree.parts(item) for item in column]
    is_nest = inside[0] is not None
    if isinstance(first, dict):  # by key: replicas may have filled them in different orders
        inside = [[item[key] for key in first] for item in column]
    if not is_nest:
        inside = [_gone_through(item) for item in column]
        if not any(inside) or all(item is first for item in column):
            return _agreed(column)
    counts = [len(parts or ()) for parts in inside]
    if len(set(counts)) > 1:
        raise InputError(
            f"{type(first).__name__}s of {', '.join(map(str, counts))} parts can't be joined: "
            "return the same number everywhere"
        )
    parts = []
    for same in zip(*(part or () for part in inside), strict=True):
        parts.append(_joined(list(same), place, dim, outputs))
    return pytree.rebuilt(first, parts) if is_nest else type(first)(parts)


def _concatenated(column: list[Tensor], place: torch.device, dim: int) -> Tensor:
    moved = [target_devices.move(item, place) for item in column]
    if dim == 0 and all(item.dim() == 0 for item in moved):
        return torch.stack(moved)
    try:
        return torch.cat(moved, dim)
    except (RuntimeError, IndexError) as error:
        raise InputError(_why_apart(moved, dim)) from error


def _why_apart(tensors: list[Tensor], dim: int) -> str:
    """Say why these tensors can't be joined along ``dim``, and what to do."""
    if any(tensor.is_nested for tensor in tensors):
        return "nested tensors can't be joined: return padded ones"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return (
        f"tensors of shapes {shapes} can't be joined along dimension {dim}; where each replica "
        "pads its share, let it pad to one length (give total_length to pad_packed_sequence)"
    )


def _gone_through(item: Any) -> list[Any]:
    """List the parts of an object that has tensors inside, as PyTorch's gather goes through it; else
    none.
    """
    if not isinstance(item, Iterable) or isinstance(item, (str, bytes, Iterator, Set)):
        return []
    parts = list(item)
    if next(pytree.tensors(parts), None) is None:
        return []
    return parts


def _agreed(column: list[Any]) -> Any:
    first = column[0]
    for number, other in enumerate(column):
        try:
            same = other is first or bool(other == first)
        except Exception:  # comparing arrays, say, gives an array
            same = False
        if not same:
            raise InputError(
                f"device 0 gave {first!r} and device {number} {other!r}, which aren't tensors and "
                "can't be joined: return tensors, or the same value everywhere"
            )
    return first
