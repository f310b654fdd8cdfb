"""The whole plan of a pipeline for a job: measured at two sizes of micro-batch, split, simulated, chosen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import devices as _devices
from lockstep.build import build_model
from lockstep.data import Part
from lockstep.devices import Devices
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.nesting import cut
from lockstep.pipelining.choose import NUMBERS, Choice, Costs, Plan, choose_schedule
from lockstep.pipelining.partition import Bench, Partition, capacities, divided, first_part
from lockstep.placement import alone

_CUT = 8
"""The second size is the batch cut in as many: near to what will be chosen, and far from the whole."""


def plan(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    devices: Devices = "auto",
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] = NUMBERS,
    chunks: Sequence[int] = (1, 2),
    memory: int | Sequence[int] | None = None,
    seconds: float = 1.0,
    **settings: Any,
) -> tuple[Partition, Choice]:
    """Measure a job's blocks, and choose how many micro-batches to cut its batches in, and in which order they go.

    Args:
        job: as in ``partition``; so are ``devices``, ``memory``, ``seconds`` and ``settings``.
        devices: the stages go over them.
        schedules: those that may be taken; None is all.
        microbatches: the numbers that may be taken.
        chunks: how many stages a device may have.
        memory: bytes of each device.
        seconds: how long to measure, for each of the two sizes.
        settings: fields of the job that are replaced.

    Returns:
        The partition that goes with the choice (of a device's several stages each is a stage of it), and the choice.

    Raises:
        StrategyError: nothing fits, or there are more stages than blocks.
    """
    chosen = _devices.parse(devices)
    given = with_settings(as_job(job), settings)
    loaded = the_job(given)
    loaded = loaded.having(loader_workers=0)
    with alone(chosen[:1]) as world:
        bench = Bench(loaded, build_model(loaded, world), world)
        whole = first_part(loaded, world)
        small = max(1, whole.size // _CUT)
        sizes = sorted({small, whole.size}, reverse=True)
        parts = {size: _smaller(whole, size) for size in sizes}
        taken = {size: bench.blocks(part, measure=True, seconds=seconds) for size, part in parts.items()}
    capacity = capacities(chosen, memory)
    blocks, seen, measured = taken[small]
    options: list[tuple[Plan, Partition]] = []
    for each in chunks:
        stages = each * len(chosen)
        if each > 1 and (stages > len(blocks) or len(chosen) == 1):
            continue
        places = [chosen[s % len(chosen)] for s in range(stages)]
        # What is held is looked at by the simulation, which knows the schedule.
        found = replace(
            divided(bench, blocks, seen, places, None, dict.fromkeys(range(stages), 1.0)),
            samples=small,
            measured=measured,
        )
        ends = [0]
        for stage in found.stages:
            ends.append(ends[-1] + len(stage.blocks))
        runs = [slice(a, b) for a, b in itertools.pairwise(ends)]
        costs = tuple(
            Costs(
                forward={size: sum(b.forward for b in taken[size][0][run]) for size in sizes},
                backward={size: sum(b.backward for b in taken[size][0][run]) for size in sizes},
                kept=sum(b.activations for b in blocks[run]) / small,
                fixed=sum(map(bench.fixed, blocks[run])),
            )
            for run in runs
        )
        options.append((Plan(tuple(s % len(chosen) for s in range(stages)), costs), found))
    plans = [layout for layout, _ in options]
    choice = choose_schedule(whole.size, plans, capacity=capacity, schedules=schedules, microbatches=microbatches)
    return next(found for layout, found in options if layout is choice.best.plan), choice


def _smaller(whole: Part, size: int) -> Part:
    """The first so many samples of a part."""
    taken = functools.partial(cut, start=0, size=size, whole=whole.size)
    return whole if size == whole.size else Part(taken(whole.inputs), taken(whole.targets), size, whole.of)
