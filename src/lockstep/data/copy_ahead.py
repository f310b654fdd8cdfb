"""Batches copied to accelerators ahead: each while the one before is used::

    copying stream     | copy 0 | copy 1 |       | copy 2 |
    computing stream            | step 0         | step 1         | ...

A copy from pageable memory would wait for all that the device was given, so what isn't pinned yet
is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

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
            _move(batch, places)
            yield batch
        return

    streams = {place: torch.Stream(place) for place in places}
    before: Batch | None = None
    copied: dict[torch.device, torch.Event] = {}  # after the copies of the last batch
    for batch in batches:
        with contextlib.ExitStack() as stack:
            for stream in streams.values():
                stack.enter_context(stream)
            _move(batch, places)

        copied_before = copied
        copied = {place: stream.record_event() for place, stream in streams.items()}
        if before is not None:
            yield _received(before, copied_before)
        before = batch

    if before is not None:
        yield _received(before, copied)


def _move(batch: Batch, places: Sequence[torch.device]) -> None:
    """Move inputs and targets of each part to their devices."""
    for i, share in enumerate(_shares(batch)):
        last = i if batch.shares else -1
        for part in share:
            for field, place in (("inputs", places[i]), ("targets", places[last])):
                move = functools.partial(to_device, device=place)
                setattr(part, field, each(move, getattr(part, field)))


def _shares(batch: Batch) -> list[list[Part]]:
    return batch.shares or [batch.parts]


def _received(batch: Batch, copied: dict[torch.device, torch.Event]) -> Batch:
    """Let the computing streams wait for the copies, and keep their memory from being given away
    before it is used.
    """
    computing = {place: torch.accelerator.current_stream(place) for place in copied}
    for place, event in copied.items():
        computing[place].wait_event(event)
    for share in _shares(batch):
        nests = [(part.inputs, part.targets) for part in share]
        for tensor in tensors(nests):
            if tensor.device in computing:
                tensor.record_stream(computing[tensor.device])

    return batch
