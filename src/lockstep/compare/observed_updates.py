"""What is observed of a few updates of a trial: the shapes on each device, and where its time goes.

The shapes are those of the first update. Some later updates are clocked as a profile clocks them,
without a trace. The timed updates lie between, and nothing observes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data import Batch
from lockstep.profiling.clock import Clock
from lockstep.profiling.time_breakdown import times_of
from lockstep.run.events import TimesOf
from lockstep.strategies.steps.step import Step
from lockstep.training.records.batch_shapes import FirstStep

CLOCKED = 6
"""Updates that are clocked."""


@dataclass(frozen=True)
class ObservedUpdates:
    """What was observed of some updates.

    Attributes:
        devices: the ``device``, ``inputs`` and ``outputs`` of the first micro-batch of each replica
            that has a sample: by its path in the nest, the shape of each tensor.
        times: the mean update of each rank or replica; empty where that isn't known.
        moved: bytes that a device gives to the others in an update; None where that isn't known.
    """

    devices: Sequence[dict[str, Any]]
    times: Sequence[TimesOf]
    moved: int | None


def observe(
    step: Step,
    first: FirstStep,
    batches: Iterator[Batch],
    seed: int,
) -> ObservedUpdates:
    """Clock some updates, and return what was observed. Every rank calls this.

    Args:
        step: whose updates are clocked.
        first: the observer of its first update.
        batches: of the updates that are clocked.
        seed: of the job.
    """
    world = step.world
    mine = [str(device) for device in world.devices]
    names = list(itertools.chain(*world.gather_objects(mine)))
    shapes = first.done(names)

    clock = Clock(step)
    with clock.observing():
        for batch in itertools.islice(clock.over(batches), CLOCKED):
            step.seed(seed)
            step.update(batch)
        clock.end_step()
    tracks = list(itertools.chain(*world.gather_objects(clock.replicas)))
    times: tuple[TimesOf, ...] = ()
    # One clock for several stages can't tell them apart.
    if "stage" not in world.layout.axes or len(tracks) == world.layout.devices:
        times = times_of(tracks, one_clock=world.nodes == 1)
    return ObservedUpdates(shapes, times, step.bytes_communicated())
