"""Batches copied to accelerators ahead: each while the one before is used::

    copying stream     | copy 0 | copy 1 |       | copy 2 |
    computing stream            | step 0         | step 1         | ...

A copy from pageable memory would wait for all that the device was given, so what isn't pinned yet
is. The micro-batches of a batch are copied together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import Batch, Part
from lockstep.tensors.pytree import each, may_pin, tensors


def copied_ahead(
    batches: Iterator[Batch], places: Sequence[torch.device], pin: bool
) -> Iterator[Batch]:
    """The same batches on the accelerators of this process.

    Args:
        batches: of a loader.
        places: where the shares go; of a batch without shares, inputs to the first and targets to
            the last.
        pin: whether to copy through pinned memory.
    """
    if not may_pin(places[0]):
        for batch in batches:
            for place, nests in _by_place(batch, places).items():
                _move(nests, place, pin=False)
            yield batch
        return
    copying = {place: torch.Stream(place) for place in places}
    before: tuple[Batch, dict[torch.device, Any]] | None = None
    for batch in batches:
        done = {}
        for place, nests in _by_place(batch, places).items():
            with copying[place]:
                _move(nests, place, pin)
                done[place] = copying[place].record_event()
        if before is not None:
            yield _received(*before)
        before = batch, done
    if before is not None:
        yield _received(*before)


def _by_place(
    batch: Batch, places: Sequence[torch.device]
) -> dict[torch.device, list[list[tuple[Part, str]]]]:
    """For each device the fields of parts that go there, those of all micro-batches together."""
    found: dict[torch.device, list[list[tuple[Part, str]]]] = {place: [] for place in places}
    for i, parts in enumerate([batch.parts] if batch.shares is None else batch.shares):
        ends = (places[0], places[-1]) if batch.shares is None else (places[i], places[i])
        for place, field in zip(ends, ("inputs", "targets"), strict=True):
            found[place].append([(part, field) for part in parts if part.size])
    return found


def _move(fields: list[list[tuple[Part, str]]], place: torch.device, pin: bool) -> None:
    for together in fields:
        every = [list(tensors(getattr(part, field))) for part, field in together]
        kinds = [
            [(tensor.shape[1:], tensor.dtype, tensor.is_cpu and tensor.dim() > 0) for tensor in own]
            for own in every
        ]
        if (
            len(every) > 1
            and kinds[0]
            and all(kind == kinds[0] for kind in kinds)
            and all(k[2] for k in kinds[0])
        ):
            by_tensor = [_rows_moved(rows, place, pin) for rows in zip(*every, strict=True)]
            moved = [list(own) for own in zip(*by_tensor, strict=True)]
        else:
            moved = [[_moved(tensor, place, pin) for tensor in own] for own in every]
        for (part, field), own in zip(together, moved, strict=True):
            setattr(part, field, each(functools.partial(_next, iter(own)), getattr(part, field)))


def _next(new: Iterator[Tensor], tensor: Tensor) -> Tensor:
    del tensor
    return next(new)


def _rows_moved(rows: Sequence[Tensor], place: torch.device, pin: bool) -> Sequence[Tensor]:
    """One copy for all micro-batches."""
    sizes = [len(those) for those in rows]
    whole = torch.empty((sum(sizes), *rows[0].shape[1:]), dtype=rows[0].dtype, pin_memory=pin)
    torch.cat(list(rows), out=whole)
    return torch.split(whole.to(place, non_blocking=True), sizes)


def _moved(tensor: Tensor, place: torch.device, pin: bool) -> Tensor:
    return (tensor.pin_memory() if pin and tensor.is_cpu else tensor).to(place, non_blocking=True)


def _received(batch: Batch, done: dict[torch.device, Any]) -> Batch:
    """Let the computing streams wait for the copies, and keep their memory from being given away
    before it is used.
    """
    computing = {place: torch.accelerator.current_stream(place) for place in done}
    for place, event in done.items():
        computing[place].wait_event(event)
    for parts in [batch.parts] if batch.shares is None else batch.shares:
        for part in parts:
            for tensor in tensors((part.inputs, part.targets)):
                if tensor.device in computing:
                    tensor.record_stream(computing[tensor.device])
    return batch
