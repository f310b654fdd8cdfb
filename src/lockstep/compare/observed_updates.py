"""What is observed of a few updates of a trial: what each device has of a batch, and where its time
goes.

Of the first update the sizes and the sample ids are noted. Some later updates are clocked as a
profile clocks them, without a trace. The timed updates lie between, and nothing observes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data import Batch, Part
from lockstep.profiling.clock import Clock
from lockstep.profiling.time_breakdown import times_of
from lockstep.run.events import TimesOf
from lockstep.strategies.steps.step import Step
from lockstep.training.records.batch_shapes import FirstStep

CLOCKED = 6
"""Updates that are clocked."""


@dataclass(frozen=True)
class DeviceBatch:
    """What a device has of the first global batch.

    Attributes:
        device: its name.
        samples: indices in the dataset, in order; None where they aren't known (a stream).
        inputs: the shape of each tensor of the first micro-batch, by its path in the nest.
        outputs: likewise of the outputs.
    """

    device: str
    samples: Sequence[int] | None
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(frozen=True)
class ObservedUpdates:
    """What was observed of some updates.

    Attributes:
        devices: what each device has; devices without a sample are left out. Where devices hold
            layers there is one entry, named after all of them: a micro-batch goes through them all.
        times: the mean update of each rank or replica; empty where that isn't known.
        overlaps: whether gradients were summed while backward ran: only the rest of it counts as
            communicating.
        moved: bytes that a device gives to the others in an update; None where that isn't known.
    """

    devices: Sequence[DeviceBatch]
    times: Sequence[TimesOf]
    overlaps: bool
    moved: int | None


class UpdateObserver:
    """Observes updates of a step on this rank, from its first one on; each rank has one.

    Args:
        step: which hasn't made an update yet.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._first = FirstStep(step)
        self._samples: list[list[int] | None] = []
        self._size = 0

    def first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches; take note of whose samples they are."""
        for batch in batches:
            shares = [batch.parts] if batch.shares is None else batch.shares
            self._samples = []
            for share in shares:
                if any(part.size for part in share):
                    self._samples.append(_ids(share))
            self._size = batch.size
            yield batch

    def clock(self, batches: Iterator[Batch], seed: int) -> ObservedUpdates:
        """Clock some more updates, and return what was observed. Every rank calls this.

        Args:
            batches: of these updates.
            seed: of the job.
        """
        step = self._step
        world = step.world
        is_staged = "stage" in world.layout.axes
        mine = [str(device) for device in world.devices]
        if is_staged:  # a replica is on all of them
            mine = [" -> ".join(mine)]
        names = list(itertools.chain(*world.gather_objects(mine)))
        shapes = self._first.done(names, self._size)
        samples = itertools.chain(*world.gather_objects(self._samples))
        devices = []
        for name, ids, inside in zip(names, samples, shapes["devices"], strict=False):
            devices.append(DeviceBatch(name, ids, inside["inputs"], inside["outputs"]))

        clock = _clocked(step, batches, seed)
        tracks = list(itertools.chain(*world.gather_objects(clock.replicas)))
        times: list[TimesOf] = []
        # One clock for several stages can't tell them apart.
        if not is_staged or len(tracks) == world.layout.devices:
            times += times_of(tracks, one_clock=world.nodes == 1)
        return ObservedUpdates(
            devices=devices,
            times=times,
            overlaps=clock.overlaps,
            moved=step.bytes_communicated(),
        )


def _clocked(step: Step, batches: Iterator[Batch], seed: int) -> Clock:
    """Clock some updates, and return the clock."""
    clock = Clock(step)
    with clock.observing():
        for batch in itertools.islice(clock.over(batches), CLOCKED):
            step.seed(seed)
            step.update(batch)
        clock.end_step()
    return clock


def _ids(share: list[Part]) -> list[int] | None:
    """Return the sample ids of a share, None where some aren't known."""
    ids: list[int] = []
    for part in share:
        if part.samples is not None:
            ids += part.samples.tolist()
        elif part.size:
            return None
    return ids
