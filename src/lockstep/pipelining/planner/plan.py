"""The whole plan of a pipeline for a job: measured at three sizes of micro-batch, split, simulated, chosen, tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lockstep.errors import TooFewLayers
from lockstep.job import Job
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.pipelining.device_map import DeviceMap
from lockstep.pipelining.planner.benchmark import Bench
from lockstep.pipelining.planner.blocks import Look
from lockstep.pipelining.planner.choice import NUMBERS, Candidate, Choice, Costs, Plan, choose_schedule
from lockstep.pipelining.planner.partition import Partition, divided

_CUTS = (8, 32)
"""Beside the whole batch it is measured cut in as many: near to what will be chosen (so the blocks are divided by these
times), and in the smallest that may be."""

_TRIALS = 3


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
    tried: bool = True,
) -> tuple[Partition, Choice]:
    """Measure a job's blocks, and choose how many micro-batches to cut its batches in, and in which order they go.

    Args:
        job: its first accumulation part is what is measured.
        devices: the stages go over them.
        device_map: the stage of each layer, where that is given; ``chunks`` then has one number, that goes with it.
        schedules: those that may be taken; None is all.
        microbatches: the numbers that may be taken, of each accumulation part.
        chunks: how many stages a device may have.
        capacity: bytes of each device; None doesn't look at memory.
        seconds: how long to measure, for each of three sizes.
        tried: whether to run what is chosen for a moment, to choose with what turns cost.

    Returns:
        The partition that goes with the choice (of a device's several stages each is a stage of it), and the choice.

    Raises:
        StrategyError: nothing fits, or there are more stages than blocks.
    """
    with alone(tuple(devices[:1])) as world:
        bench = Bench(job, world)
        looks, too_small = _looks(bench, seconds)
    batch = bench.first.size
    near = next((size for size in looks if size == max(1, batch // _CUTS[0])), min(looks))
    plans: list[Plan] = []
    partitions: dict[tuple[int, ...], Partition] = {}  # by the places of a plan's stages
    for each in chunks:
        stages = each * len(devices)
        if device_map is None and each > 1 and (stages > len(looks[near].blocks) or len(devices) == 1):
            continue
        places = tuple(stage % len(devices) for stage in range(stages))
        # What is held is looked at by the simulation, which knows the schedule.
        found = divided(bench, looks[near], near, [devices[place] for place in places], given=device_map)
        partitions[places] = found
        plans.append(Plan(places, _costs(bench, looks, found)))
    if not plans:
        raise TooFewLayers(
            f"partition: {min(chunks) * len(devices)} stages, but the model has {len(looks[near].blocks)} blocks that "
            "can be placed"
        )
    # A batch is in no more micro-batches than it has samples, whatever was asked for.
    numbers = sorted({min(number, batch) for number in microbatches})
    # (Where none is left they were asked for, and the first update says what is wrong with them.)
    numbers = [number for number in numbers if batch // number > too_small] or numbers

    def choose(plans: Sequence[Plan]) -> Choice:
        return choose_schedule(batch, plans, capacity=capacity, schedules=schedules, microbatches=numbers)

    def seconds_of(best: Candidate) -> float | None:
        if best.microbatches == 1:
            return best.seconds
        device_map = partitions[best.plan.places].device_map
        try:
            return bench.seconds_taken(device_map, best.order, devices, seconds=seconds)
        except Exception:  # the first update will say why
            return None

    several = bench.device.is_slot and len(devices) > 1
    choice = _tried(plans, choose, seconds_of) if tried and several else choose(plans)
    return partitions[choice.best.plan.places], choice


def _tried(
    plans: Sequence[Plan], choose: Callable[[Sequence[Plan]], Choice], seconds_of: Callable[[Candidate], float | None]
) -> Choice:
    """The fastest of up to three choices that were run, each made with what turns cost in the one before."""
    fastest = math.inf
    choice = found = choose(plans)
    names: set[str] = set()
    for _ in range(_TRIALS):
        best = choice.best
        if best.name in names or (taken := seconds_of(best)) is None:
            break
        names.add(best.name)
        choice = choose([best.corrected(plan, taken) for plan in plans])
        if taken < fastest:
            fastest = taken
            found = replace(choice, best=next(one for one in choice.candidates if one.name == best.name))
    return found


def _looks(bench: Bench, seconds: float) -> tuple[dict[int, Look], int]:
    """The costs of the blocks by the samples of a micro-batch, and the first size that the model can't take (0: none).

    A size with which forward goes another way tells nothing of the blocks, and is left out.
    """
    whole = bench.first.size
    looks: dict[int, Look] = {}
    for size in sorted({whole, *(max(1, whole // cut) for cut in _CUTS)}, reverse=True):
        try:
            looks[size] = bench.look(bench.part(size), seconds=seconds)
        except Exception:
            if size == whole:
                raise
            return looks, size  # BatchNorm, say, has nothing to normalise over in one sample
    return looks, 0


def _costs(bench: Bench, looks: Mapping[int, Look], found: Partition) -> tuple[Costs, ...]:
    """What each stage of a partition costs, at each size with which forward goes the same way."""
    names = [block.name for block in found.blocks]
    by_name = {size: {block.name: block for block in look.blocks} for size, look in looks.items()}
    same = {size: blocks for size, blocks in by_name.items() if set(blocks) == set(names)}
    return tuple(
        Costs(
            forward={size: sum(same[size][block.name].forward for block in stage.blocks) for size in same},
            backward={size: sum(same[size][block.name].backward for block in stage.blocks) for size in same},
            kept=stage.activations / found.samples,
            fixed=sum(map(bench.fixed, stage.blocks)),
        )
        for stage in found.stages
    )
