"""A glance at a few updates of a trial: what each device sees and holds of a batch, and where its
time goes.

The first update is listened to (sizes, sample ids); some later ones are clocked as a profile clocks
them, without a trace. The timed updates lie between, and have nothing of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.data import Batch, Part
from lockstep.launch.events import TimesOf
from lockstep.profiling.clock import Clock
from lockstep.profiling.time_breakdown import times_of
from lockstep.strategies.steps.step import Step
from lockstep.training.records.batch_shapes import FirstStep

CLOCKED = 6
"""Updates that are clocked."""


@dataclass(frozen=True)
class Seen:
    """What a device sees of the first global batch."""

    device: str
    samples: (
        Sequence[int] | None
    )  # indices in the dataset of its share, in order; None where not known (a stream)
    inputs: dict[str, Any]  # the shape of each tensor, of the first micro-batch, by the way to it
    outputs: dict[str, Any]


@dataclass(frozen=True)
class Glance:
    """What was seen of some updates."""

    # What each device sees; those without a sample are left out. Where devices hold layers there is
    # one entry, named after all of them: each micro-batch goes through them all.
    devices: Sequence[Seen]
    inputs: dict[str, Any]  # the shape of each tensor of the global batch
    outputs: dict[str, Any]
    times: Sequence[
        TimesOf
    ]  # the mean update of each rank or replica; empty where that isn't known
    # whether gradients were summed while backward ran: only the rest of it counts as communicating
    overlaps: bool
    moved: (
        int | None
    )  # bytes that a device gives to the others in an update; None where that isn't known
    timelines: dict[str, Any] = field(
        default_factory=dict
    )  # by title, when stages computed (``Timeline.plain``)


class Onlooker:
    """Looks at the updates of a step on this rank, from its first one on; each rank has one."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._first = FirstStep(step)
        self._samples: list[list[int] | None] = []
        self._size = 0

    def first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; takes note of whose samples they are."""
        for batch in batches:
            shares = [batch.parts] if batch.shares is None else batch.shares
            self._samples = [_ids(share) for share in shares if any(part.size for part in share)]
            self._size = batch.size
            yield batch

    def seen(self, batches: Iterator[Batch], seed: int) -> Glance:
        """Clock some more updates, and tell. Every rank calls this."""
        step, world = self._step, self._step.world
        mine = [str(device) for device in world.devices]
        if is_staged := "stage" in world.layout.axes:  # a replica is on all of them
            mine = [" -> ".join(mine)]
        names = [name for theirs in world.gather_objects(mine) for name in theirs]
        shapes = self._first.done(world, names, self._size)
        samples = [one for theirs in world.gather_objects(self._samples) for one in theirs]
        devices = [
            Seen(name, ids, inside["inputs"], inside["outputs"])
            for name, ids, inside in zip(names, samples, shapes["devices"], strict=False)
        ]
        clock = _clocked(step, batches, seed)
        timelines = {title: one.plain() for title, one in clock.timelines.items()}
        tracks = [track for mine in world.gather_objects(clock.replicas) for track in mine]
        # One clock for several stages would tell of none of them.
        known = not is_staged or len(tracks) == world.layout.devices
        times = list(times_of(tracks, one_clock=world.nodes == 1)) if known else []
        moved = step.bytes_communicated()
        return Glance(
            devices, shapes["inputs"], shapes["outputs"], times, clock.overlaps, moved, timelines
        )


def _clocked(step: Step, batches: Iterator[Batch], seed: int) -> Clock:
    """Clock some updates."""
    clock = Clock(step)
    with clock.observing():
        for batch in itertools.islice(clock.over(batches), CLOCKED):
            step.seed(seed)
            step.update(batch)
        clock.end_step()
    return clock


def _ids(share: list[Part]) -> list[int] | None:
    ids: list[int] = []
    for part in share:
        if part.size and part.samples is None:
            return None
        ids += [] if part.samples is None else part.samples.tolist()
    return ids
