"""Batches copied to accelerators ahead: each while the one before is used::

    copying stream     | copy 0 | copy 1 |       | copy 2 |
    computing stream            | step 0         | step 1         | ...

A copy from pageable memory would wait for all that the device was given, so what isn't pinned yet
is. The micro-batches of a batch are copied together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import Batch, Part
from lockstep.tensors.pytree import each, may_pin, tensors, to_device


def copied_ahead(batches: Iterator[Batch], places: Sequence[torch.device]) -> Iterator[Batch]:
    """Yield the same batches on the accelerators of this process.

    Args:
        batches: of a loader.
        places: where the shares go; of a batch without shares, inputs to the first and targets to
            the last.
    """
    # Without pinned memory a copy waits for the device, so nothing is copied ahead.
    if not may_pin(places[0]):
        for batch in batches:
            for place, field, parts in _fields(batch, places):
                _move(field, parts, place)
            yield batch
        return

    streams = {place: torch.Stream(place) for place in places}
    before: Batch | None = None
    copied: dict[torch.device, Any] = {}  # the events after the copies of the last batch
    for batch in batches:
        for place, field, parts in _fields(batch, places):
            with streams[place]:
                _move(field, parts, place)

        copied_before = copied
        copied = {place: stream.record_event() for place, stream in streams.items()}
        if before is not None:
            yield _received(before, copied_before)
        before = batch

    if before is not None:
        yield _received(before, copied)


def _fields(
    batch: Batch, places: Sequence[torch.device]
) -> Iterator[tuple[torch.device, str, list[Part]]]:
    """Yield where each field of the parts goes, those of all micro-batches together."""
    for i, share in enumerate(batch.shares or [batch.parts]):
        parts = [part for part in share if part.size]
        yield places[i], "inputs", parts
        yield places[i if batch.shares else -1], "targets", parts


def _move(field: str, parts: list[Part], place: torch.device) -> None:
    """Move a field of all micro-batches to a device.

    Args:
        field: ``inputs`` or ``targets``.
        parts: the micro-batches that aren't empty.
        place: the device.
    """
    nests = [getattr(part, field) for part in parts]
    held = [list(tensors(nest)) for nest in nests]
    move = functools.partial(to_device, device=place)
    if len(parts) < 2 or not _are_rows(held):
        for part, nest in zip(parts, nests, strict=True):
            setattr(part, field, each(move, nest))
        return

    together = [_rows_moved(rows, place) for rows in zip(*held, strict=True)]
    for part, nest, own in zip(parts, nests, zip(*together, strict=True), strict=True):
        setattr(part, field, _with_tensors(nest, own))


def _with_tensors(nest: Any, new: Iterable[Tensor]) -> Any:
    """Return the same nest with other tensors in the place of its own."""
    ahead = iter(new)
    return each(lambda _: next(ahead), nest)


def _are_rows(held: list[list[Tensor]]) -> bool:
    """Whether the tensors of all micro-batches can be put together, row by row.

    Args:
        held: the tensors of each micro-batch.
    """
    kinds = [[(tensor.shape[1:], tensor.dtype) for tensor in own] for own in held]
    in_rows = all(tensor.is_cpu and tensor.dim() for own in held for tensor in own)
    return in_rows and bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)


def _rows_moved(rows: Sequence[Tensor], place: torch.device) -> Sequence[Tensor]:
    """Make one copy for all micro-batches.

    Args:
        rows: a tensor of each micro-batch.
        place: the device.
    """
    sizes = [len(those) for those in rows]
    shape = (sum(sizes), *rows[0].shape[1:])
    whole = torch.empty(shape, dtype=rows[0].dtype, pin_memory=may_pin(place))
    torch.cat(list(rows), out=whole)
    return torch.split(whole.to(place, non_blocking=True), sizes)


def _received(batch: Batch, copied: dict[torch.device, Any]) -> Batch:
    """Let the computing streams wait for the copies, and keep their memory from being given away
    before it is used.
    """
    computing = {place: torch.accelerator.current_stream(place) for place in copied}
    for place, event in copied.items():
        computing[place].wait_event(event)
    for part in (part for share in batch.shares or [batch.parts] for part in share):
        for tensor in tensors((part.inputs, part.targets)):
            if tensor.device in computing:
                tensor.record_stream(computing[tensor.device])

    return batch
