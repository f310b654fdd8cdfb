"""The whole plan of a pipeline for a job: measured at three sizes of micro-batch, split, simulated, chosen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.data import Part
from lockstep.errors import TooFewLayers
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.launch.placement import alone
from lockstep.model.build import build_model
from lockstep.pipelining.device_map import DeviceMap, longest
from lockstep.pipelining.planner.benchmark import seconds_taken
from lockstep.pipelining.planner.blocks import Block
from lockstep.pipelining.planner.choice import NUMBERS, Candidate, Choice, Costs, Plan, choose_schedule
from lockstep.pipelining.planner.cost_estimate import Look
from lockstep.pipelining.planner.partition import Bench, Partition, Stage, capacities, divided, first_part
from lockstep.tensors.pytree import cut, share_sizes

_CUTS = (8, 32)
"""Beside the whole batch it is measured cut in as many: near to what will be chosen (so the blocks are divided by these
times), and in the smallest that may be."""


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
        seconds: how long to measure, for each of three sizes.
        settings: fields of the job that are replaced.

    Returns:
        The partition that goes with the choice (of a device's several stages each is a stage of it), and the choice.

    Raises:
        StrategyError: nothing fits, or there are more stages than blocks.
    """
    chosen = _devices.parse(devices)
    return planned(
        the_job(with_settings(as_job(job), settings)),
        chosen,
        schedules=schedules,
        microbatches=microbatches,
        chunks=chunks,
        capacity=capacities(chosen, memory),
        seconds=seconds,
    )


def planned(
    job: Job,
    devices: Sequence[Device],
    *,
    device_map: DeviceMap | None = None,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] = NUMBERS,
    chunks: Sequence[int] = (1, 2),
    capacity: Sequence[float] | None = None,
    seconds: float = 1.0,
    rehearsed: bool = True,
) -> tuple[Partition, Choice]:
    """As ``plan``, for a job that is loaded.

    Args:
        job: its first batch is what is measured.
        devices: the stages go over them.
        device_map: the stage of each layer, where that is given; ``chunks`` then has one number, that goes with it.
        schedules: as in ``plan``; so are ``microbatches``, ``chunks`` and ``seconds``.
        microbatches: of each accumulation part.
        chunks: how many stages a device may have.
        capacity: bytes of each device; None doesn't look at memory.
        seconds: how long to measure.
        rehearsed: whether to run what is chosen first for a moment, to choose with what turns cost.
    """
    loaded = job.replace(loader_workers=0)
    with alone(tuple(devices[:1])) as world:
        bench = Bench(loaded, build_model(loaded, world), world)
        whole = first_part(loaded, world)
        wanted = sorted({whole.size, *(max(1, whole.size // cut) for cut in _CUTS)}, reverse=True)
        parts = {size: _smaller(whole, size) for size in wanted}
        taken: dict[int, tuple[list[Block], Look, bool]] = {}
        for size, part in parts.items():
            try:
                taken[size] = bench.blocks(part, measure=True, seconds=seconds, adds=size < whole.size)
            except Exception:
                if size == whole.size:
                    raise
                break  # a model that can't take so few samples: BatchNorm has nothing to normalise over in one
        slower = {size: bench.contention(parts[size], devices) for size in taken}
    sizes = list(taken)
    too_small = next((size for size in wanted if size not in taken), 0)
    small = next((size for size in sizes if size == max(1, whole.size // _CUTS[0])), sizes[-1])
    blocks, seen, measured = taken[small]
    names = [block.name for block in blocks]
    # A size with which forward goes another way tells nothing of these blocks.
    sizes = [size for size in sizes if [block.name for block in taken[size][0]] == names]
    options: list[tuple[Plan, Partition]] = []
    for each in chunks:
        stages = each * len(devices)
        if device_map is None and each > 1 and (stages > len(blocks) or len(devices) == 1):
            continue
        places = tuple(s % len(devices) for s in range(stages))
        on = [devices[place] for place in places]
        if device_map is not None:
            found = _given(bench, blocks, device_map, on)
        else:
            # What is held is looked at by the simulation, which knows the schedule.
            found = divided(bench, blocks, seen, on, None, dict.fromkeys(range(stages), 1.0))
        by_name = {size: {block.name: block for block in taken[size][0]} for size in sizes}
        costs = tuple(
            Costs(
                forward={
                    size: slower[size] * sum(by_name[size][b.name].forward for b in stage.blocks) for size in sizes
                },
                backward={
                    size: slower[size] * sum(by_name[size][b.name].backward for b in stage.blocks) for size in sizes
                },
                kept=stage.activations / small,
                fixed=sum(map(bench.fixed, stage.blocks)),
            )
            for stage in found.stages
        )
        # One device that trains the whole batch is disturbed by nobody.
        by_itself = sum(block.time for block in taken[whole.size][0])
        options.append((Plan(places, costs, by_itself), replace(found, samples=small, measured=measured)))
    if not options:
        raise TooFewLayers(
            f"partition: {min(chunks) * len(devices)} stages, but the model has {len(blocks)} blocks that can be placed"
        )
    # A batch is in no more micro-batches than it has samples, whatever was asked for.
    numbers = sorted({min(number, whole.size) for number in microbatches})
    # (Where none is left they were asked for, and the first update says what is wrong with them.)
    numbers = [number for number in numbers if whole.size // number > too_small] or numbers
    choose = functools.partial(
        choose_schedule, whole.size, capacity=capacity, schedules=schedules, microbatches=numbers
    )
    choice = choose([layout for layout, _ in options])
    if rehearsed and bench.device.is_slot and choice.best.plan.devices > 1 and choice.best.microbatches > 1:
        taken_by_best = _rehearsed(bench, whole, _found(options, choice), choice.best, devices, seconds)
        options = [(choice.best.corrected(layout, taken_by_best), found) for layout, found in options]
        choice = choose([layout for layout, _ in options])
    return _found(options, choice), choice


def _found(options: Sequence[tuple[Plan, Partition]], choice: Choice) -> Partition:
    """The partition that goes with a choice."""
    return next(found for layout, found in options if layout is choice.best.plan)


def _rehearsed(
    bench: Bench, whole: Part, found: Partition, best: Candidate, devices: Sequence[Device], seconds: float
) -> float:
    """The seconds that the best candidate takes; as simulated where that fails: the first update will say why."""
    sizes = share_sizes(whole.size, best.microbatches)
    starts = itertools.accumulate(sizes, initial=0)
    try:
        parts = [bench.placed(_smaller(whole, size, start)) for size, start in zip(sizes, starts, strict=False)]
        taken = seconds_taken(bench.copied(), parts, found.device_map, best, devices, seconds=seconds)
    except Exception:
        taken = None
    return best.seconds if taken is None else taken


def _given(bench: Bench, blocks: Sequence[Block], device_map: DeviceMap, devices: Sequence[Device]) -> Partition:
    """The partition that a device map says; the blocks of a stage need not follow one another."""
    stages: dict[int, list[Block]] = {stage: [] for stage in range(len(devices))}
    for block in blocks:
        stages[longest(block.name, device_map) or 0].append(block)
    return Partition(
        dict(device_map),
        tuple(Stage(devices[s], tuple(mine), sum(map(bench.fixed, mine)), None) for s, mine in stages.items()),
        0,
        False,
    )


def _smaller(whole: Part, size: int, start: int = 0) -> Part:
    """So many samples of a part."""
    taken = functools.partial(cut, start=start, size=size, whole=whole.size)
    return whole if size == whole.size else Part(taken(whole.inputs), taken(whole.targets), size, whole.of)
