"""The whole plan of a pipeline for a job: measured, split, simulated, chosen.

More micro-batches wait less, but cutting a batch costs: small operators are slower for each sample.
So each stage's time is measured for several sizes of micro-batch, and is taken to lie on a straight
line between them. Every schedule is simulated with every number of micro-batches; what doesn't fit
into the devices' memory is left out. Where there is nothing to choose, one size is measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy

from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.pipelining.device_map import DeviceMap, longest
from lockstep.pipelining.planner.balanced_split import split
from lockstep.pipelining.planner.blocks import Block, map_of
from lockstep.pipelining.planner.measured_blocks import ModelBenchmark
from lockstep.pipelining.planner.simulate import Timeline, simulate
from lockstep.pipelining.planner.stage_table import Partition, Stage
from lockstep.pipelining.schedule import Kind, Schedule, gpipe, interleaved, one_f_one_b
from lockstep.tensors.byte_size import size as size_text
from lockstep.tensors.rows import share_sizes

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The numbers of micro-batches that are simulated."""

_SLACK = 0.01
"""How much slower the slowest stage may be, as a share, for a cut between larger modules: less than
noise.
"""

_NEAR = 1.01
"""What is slower than the fastest by no more than that is as good, and then the one that holds
less is taken.
"""

_NEAR_CUT = 8
_SMALL_CUT = 32
"""Beside the whole batch it is measured cut in as many: near to what will be chosen (so the blocks
are divided by these times), and in the smallest that may be.
"""


@dataclass(frozen=True)
class Costs:
    """What one stage costs.

    Attributes:
        forward: seconds by the samples of a micro-batch.
        backward: the same.
        kept: bytes that a sample leaves for backward.
        fixed: bytes that are there always: parameters, gradients, the optimizer's state.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    kept: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A way to lay the model over the devices: stage s is on device ``s % devices``.

    Attributes:
        devices: how many.
        costs: what each stage costs.
        partition: the layers of each stage.
    """

    devices: int
    costs: tuple[Costs, ...]
    partition: Partition | None = None

    @property
    def chunks(self) -> int:
        """The number of stages on each device."""
        return len(self.costs) // self.devices

    def schedules(self, microbatches: int) -> dict[str, Schedule]:
        """Return the schedules that this plan can have, by name."""
        if self.chunks > 1:
            return {"interleaved": interleaved(self.devices, microbatches, self.chunks)}
        return {
            "1f1b": one_f_one_b(self.devices, microbatches),
            "gpipe": gpipe(self.devices, microbatches),
        }


@dataclass(frozen=True)
class Candidate:
    """One schedule with one number of micro-batches, simulated.

    Attributes:
        plan: whose schedule it is.
        schedule: its name.
        microbatches: how many.
        timeline: as simulated.
        one_device: seconds of one device with the whole batch.
        filled: the share of its memory that the fullest device holds, at most; 0 where memory isn't
            looked at.
        peak: bytes of that.
    """

    plan: Plan
    schedule: str
    microbatches: int
    timeline: Timeline
    one_device: float
    filled: float
    peak: float

    @property
    def seconds(self) -> float:
        """Of forward and backward of a global batch."""
        return self.timeline.makespan

    def __str__(self) -> str:
        return f"{self.schedule} with {counted(self.microbatches, 'micro-batch', 'es')}"


@dataclass(frozen=True)
class Choice:
    """The best candidate for a global batch, and all candidates, the fastest first."""

    best: Candidate
    samples: int
    candidates: tuple[Candidate, ...]

    @property
    def why(self) -> str:
        """A sentence or two."""
        best = self.best
        seconds = best.seconds
        samples = counted(self.samples, "sample")
        why = (
            f"{best}: {seconds * 1e3:.3g} ms of forward and backward for {samples}, "
            f"{best.one_device / seconds:.3g} times as fast as one device with the whole batch "
            f"(bubble {100 * best.timeline.bubble:.1f} %)"
        )
        if best.one_device < seconds and best.plan.devices > 1:
            why += (
                "; micro-batches cost more here than overlap gains: one device, or larger "
                "batches, would be faster"
            )
        return why


def choose_schedule(
    batch: int,
    plans: Sequence[Plan],
    *,
    capacity: Sequence[float] | None = None,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] = NUMBERS,
) -> Choice:
    """Simulate every schedule with every number of micro-batches, and take the fastest that fits.

    Args:
        batch: how many samples it has; its micro-batches have one at least.
        plans: the ways to lay the model over the devices.
        capacity: bytes of each device; None doesn't look at memory.
        schedules: those that may be taken; None is all.
        microbatches: the numbers that may be taken.

    Raises:
        StrategyError: nothing fits, or there is nothing to choose from.
    """
    found: list[Candidate] = []
    for plan, number in itertools.product(plans, microbatches):
        if number <= batch:
            for candidate in _candidates(batch, plan, number, capacity):
                if schedules is None or candidate.schedule in schedules:
                    found.append(candidate)
    if not found:
        raise StrategyError(
            f"schedule: no {schedules or 'schedule'} with {list(microbatches)} micro-batches of a "
            f"batch of {batch}"
        )
    found.sort(key=lambda candidate: candidate.seconds)
    fitting = [candidate for candidate in found if candidate.filled <= 1]
    if not fitting:
        nearest = min(found, key=lambda candidate: candidate.filled)
        raise StrategyError(
            f"schedule: nothing fits: {nearest} needs {size_text(nearest.peak)} on a device that "
            f"has {size_text(nearest.peak / nearest.filled)}: use more devices, a smaller "
            "batch_size, or activation_checkpointing"
        )
    limit = _NEAR * fitting[0].seconds
    as_fast = [candidate for candidate in fitting if candidate.seconds <= limit]
    best = min(as_fast, key=lambda one: (one.plan.chunks, one.filled, one.seconds))
    return Choice(best, batch, tuple(found))


def at(points: Mapping[int, float], samples: int) -> float:
    """Give the time for a number of samples, on the straight lines between the sizes that were
    measured. A micro-batch below the smallest one isn't cheaper.

    Args:
        points: seconds by samples.
        samples: how many.
    """
    sizes = sorted(points)
    return float(numpy.interp(samples, sizes, [points[size] for size in sizes]))


def _candidates(
    batch: int,
    plan: Plan,
    microbatches: int,
    capacity: Sequence[float] | None,
) -> Iterator[Candidate]:
    """Simulate each schedule of a plan with a number of micro-batches.

    Args:
        batch: how many samples it has.
        plan: whose schedules they are.
        microbatches: how many.
        capacity: bytes of each device; None doesn't look at memory.
    """
    sizes = share_sizes(batch, microbatches)
    kept = {stage: cost.kept * sizes[0] for stage, cost in enumerate(plan.costs)}
    one_device = sum(at(cost.forward, batch) + at(cost.backward, batch) for cost in plan.costs)

    @functools.cache
    def seconds(stage: int, kind: Kind, size: int) -> float:
        cost = plan.costs[stage]
        return at(cost.forward if kind == "F" else cost.backward, size)

    for name, schedule in plan.schedules(microbatches).items():
        timeline = simulate(
            schedule, lambda one: seconds(one.stage, one.kind, sizes[one.microbatch])
        )
        full = []
        for device, held in enumerate(timeline.held(kept)):
            room = math.inf if capacity is None else max(capacity[device], 1.0)
            peak = held + sum(cost.fixed for cost in plan.costs[device :: plan.devices])
            full.append((peak / room, peak))
        yield Candidate(plan, name, microbatches, timeline, one_device, *max(full))


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
) -> tuple[Partition, Choice]:
    """Measure a job's blocks, and choose how many micro-batches to cut its batches in, and in which
    order they go.

    Args:
        job: its first accumulation part is what is measured.
        devices: the stages go over them.
        device_map: the stage of each layer, where that is given; ``chunks`` then has one number,
            that goes with it.
        schedules: those that may be taken; None is all.
        microbatches: the numbers that may be taken, of each accumulation part.
        chunks: how many stages a device may have.
        capacity: bytes of each device; None doesn't look at memory.
        seconds: how long to measure, for each of three sizes.

    Returns:
        The partition that goes with the choice (of a device's several stages each is a stage of
        it), and the choice.

    Raises:
        TooFewLayers: there are more stages than blocks.
        StrategyError: nothing fits.
    """
    is_settled = schedules is not None and len(schedules) == len(microbatches) == len(chunks) == 1
    parts = microbatches[0] if is_settled else 1
    with alone(tuple(devices[:1])) as world:
        bench = ModelBenchmark(job.replace(accumulate=parts * job.accumulate), world)
        first = bench.first.size
        sizes = [first, max(1, first // _NEAR_CUT), max(1, first // _SMALL_CUT)]
        by_size = _measured_at_sizes(bench, sizes[:1] if is_settled else sizes, seconds)
    batch = parts * first
    # A batch is in no more micro-batches than it has samples, whatever was asked for.
    numbers = sorted({min(number, batch) for number in microbatches})
    near = sizes[1] if len(by_size) > 1 else sizes[0]
    blocks = by_size[near]
    possible = [number for number in numbers if batch // number >= min(by_size)]

    def choice_of(cost: Callable[[Block], float], rooms: Sequence[float] | None = None) -> Choice:
        plans: list[Plan] = []
        for each in chunks:
            of_stages = [*devices] * each
            if plans and (len(of_stages) > len(blocks) or len(devices) == 1):
                continue
            room = None if rooms is None else [*rooms] * each
            found = _divided(bench, blocks, near, of_stages, device_map, cost, room)
            plans.append(Plan(len(devices), _costs(bench, by_size, found), found))
        return choose_schedule(
            batch,
            plans,
            capacity=capacity,
            schedules=schedules,
            # If none is possible, the first update says what is wrong with them.
            microbatches=possible or numbers,
        )

    try:
        choice = choice_of(lambda block: block.time)
    except StrategyError:  # stages of like times don't fit
        choice = choice_of(bench.bytes_of, capacity)
    return _with_needs(choice), choice


def _divided(
    bench: ModelBenchmark,
    blocks: Sequence[Block],
    samples: int,
    devices: Sequence[Device],
    given: DeviceMap | None,
    cost: Callable[[Block], float],
    rooms: Sequence[float] | None,
) -> Partition:
    """Find the best run of blocks for each stage, or those of a device map, which need not
    follow one another.

    Args:
        bench: whose blocks they are.
        blocks: with their costs for a micro-batch.
        samples: the size of the micro-batch.
        devices: of each stage.
        given: the stage of each layer, where that is known.
        cost, rooms: as in ``split``.
    """
    runs: list[list[Block]] = [[] for _ in devices]
    if given is None:
        bounds = split(blocks, len(devices), cost=cost, rooms=rooms, slack=_SLACK)
        for run, (first, last) in zip(runs, itertools.pairwise(bounds), strict=True):
            run += blocks[first:last]
        device_map = map_of(bench.model, blocks, bounds)
    else:
        for block in blocks:
            runs[longest(block.name, given) or 0].append(block)
        device_map = dict(given)
    pairs = zip(devices, runs, strict=True)
    return Partition(device_map, tuple(Stage(device, tuple(run)) for device, run in pairs), samples)


def _with_needs(choice: Choice) -> Partition:
    """Return the partition of the best candidate, with the bytes that each stage needs in it."""
    best = choice.best
    plan = best.plan
    assert plan.partition is not None
    sample = dict.fromkeys(range(len(plan.costs)), 0.0)
    size = share_sizes(choice.samples, best.microbatches)[0]
    stages = []
    for number, (stage, cost) in enumerate(zip(plan.partition.stages, plan.costs, strict=True)):
        held = best.timeline.held({**sample, number: cost.kept * size})
        stages.append(replace(stage, need=cost.fixed + sum(held)))
    return replace(plan.partition, stages=tuple(stages))


def _measured_at_sizes(
    bench: ModelBenchmark, sizes: Sequence[int], seconds: float
) -> dict[int, tuple[Block, ...]]:
    """Measure the blocks by the samples of a micro-batch, down to what the model can take.

    Args:
        bench: the model.
        sizes: the samples, the largest first.
        seconds: how long to measure, for each size.
    """
    by_size = {sizes[0]: bench.blocks(sizes[0], seconds)}
    for size in sizes[1:]:
        if size in by_size:
            continue
        try:
            by_size[size] = bench.blocks(size, seconds)
        except Exception:
            break  # BatchNorm, say, has nothing to normalise over in one sample
    return by_size


def _costs(
    bench: ModelBenchmark,
    by_size: Mapping[int, Sequence[Block]],
    found: Partition,
) -> tuple[Costs, ...]:
    """Sum what each stage of a partition costs, at each size with which forward goes the same way.

    Args:
        bench: the model.
        by_size: its blocks by the samples of a micro-batch.
        found: the partition.
    """
    names = {block.name for block in found.blocks}
    costs = []
    for stage in found.stages:
        own = {block.name for block in stage.blocks}
        forward = {}
        backward = {}
        for size, blocks in by_size.items():
            if {block.name for block in blocks} == names:
                here = [block for block in blocks if block.name in own]
                forward[size] = sum(block.forward for block in here)
                backward[size] = sum(block.backward for block in here)
        kept = stage.activations / found.samples
        fixed = sum(bench.fixed(block) for block in stage.blocks)
        costs.append(Costs(forward, backward, kept, fixed))
    return tuple(costs)
