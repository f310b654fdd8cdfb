"""The whole plan of a pipeline for a job: measured at three sizes of micro-batch, split, simulated,
chosen.

More micro-batches wait less, but cutting a batch costs: small operators are slower for each sample.
So each stage's time is known for two sizes of micro-batch or more, and is taken to be a straight
line between them::

    time of a stage for n samples  =  a + b n        a: what each micro-batch costs, however small

Every schedule is simulated with every number of micro-batches; what doesn't fit into the devices'
memory is left out.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.pipelining.device_map import DeviceMap
from lockstep.pipelining.planner.blocks import Block, ModelBlocks
from lockstep.pipelining.planner.measured_blocks import ModelBenchmark
from lockstep.pipelining.planner.partition import divided
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.planner.stage_table import Partition
from lockstep.pipelining.schedule import Schedule, gpipe, interleaved, one_f_one_b
from lockstep.pipelining.timeline import Timeline
from lockstep.tensors.byte_size import size as size_text
from lockstep.tensors.rows import share_sizes

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of micro-batches that are simulated."""

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
        forward: seconds by the samples of a micro-batch, for two sizes or more.
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
    """A way to lay the model over the devices.

    Attributes:
        places: the device of each stage.
        costs: what each stage costs.
    """

    places: tuple[int, ...]
    costs: tuple[Costs, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return max(self.places) + 1

    def schedules(self, microbatches: int) -> dict[str, Schedule]:
        """Return the schedules that this plan can have, by name."""
        chunks = len(self.places) // self.devices
        if chunks > 1:
            return {"interleaved": interleaved(self.devices, microbatches, chunks)}
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
        peak: bytes that each device holds at most.
        filled: those, as shares of what each device has; 0 where memory isn't looked at.
        cutting: how many times the work of the whole batch its micro-batches take together.
    """

    plan: Plan
    schedule: str
    microbatches: int
    timeline: Timeline
    peak: tuple[float, ...]
    filled: tuple[float, ...]
    cutting: float

    @property
    def fits(self) -> bool:
        """Whether each device has the memory."""
        return max(self.filled) <= 1

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
        timeline = best.timeline
        whole = seconds * timeline.speed_up / best.cutting
        samples = counted(self.samples, "sample")
        bubble = f"bubble {100 * timeline.bubble:.1f} %"
        why = (
            f"{best}: {seconds * 1e3:.3g} ms of forward and backward for {samples}, "
            f"{whole / seconds:.3g} times as fast as one device with the whole batch "
            f"({bubble}, cutting costs {best.cutting:.2f})"
        )
        if whole < seconds and best.plan.devices > 1:
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
        StrategyError: nothing fits (the message has both sizes), or there is nothing to choose
            from.
    """
    found: list[Candidate] = []
    for plan, number in itertools.product(plans, microbatches):
        if 1 <= number <= batch:
            found += _candidates(batch, plan, number, capacity, schedules)
    if not found:
        raise StrategyError(
            f"schedule: there is nothing to choose from: {len(plans)} plans, schedules "
            f"{schedules or 'all'}, micro-batches {list(microbatches)} of a batch of {batch}"
        )
    found.sort(key=lambda candidate: candidate.seconds)
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting and capacity is not None:
        nearest = min(found, key=lambda candidate: max(candidate.filled))
        fullest = max(nearest.filled)
        device = nearest.filled.index(fullest)
        needed = size_text(nearest.peak[device])
        has = size_text(capacity[device])
        raise StrategyError(
            f"schedule: nothing fits: {nearest} needs {needed} on device {device}, which has "
            f"{has}: use more devices, a smaller batch_size, or activation_checkpointing"
        )
    limit = _NEAR * fitting[0].seconds
    as_fast = [candidate for candidate in fitting if candidate.seconds <= limit]
    best = min(as_fast, key=_preference)
    return Choice(best, batch, tuple(found))


def _preference(candidate: Candidate) -> tuple[int, float, int]:
    """Give the key of a candidate among those that are as fast; the least is taken."""
    stages = len(candidate.plan.places)
    peak = max(candidate.peak)
    return stages, peak, candidate.microbatches


def at(points: Mapping[int, float], samples: int) -> float:
    """Give the time for a number of samples, on the straight line through the two nearest sizes.

    Below the smallest size it is at least in proportion to samples: a sample of a small micro-batch
    is never cheaper.

    Args:
        points: seconds by samples.
        samples: how many.
    """
    if samples in points:
        return points[samples]
    sizes = sorted(points)
    smallest = sizes[0]
    in_proportion = points[smallest] * samples / smallest
    if len(sizes) == 1:
        return in_proportion
    right = bisect.bisect(sizes, samples, 1, len(sizes) - 1)
    low = sizes[right - 1]
    high = sizes[right]
    slope = (points[high] - points[low]) / (high - low)
    # A line that would fall, by noise, is taken as level.
    value = points[low] + max(slope, 0.0) * (samples - low)
    if samples < smallest:
        value = max(value, in_proportion)
    return value


def _candidates(
    batch: int,
    plan: Plan,
    microbatches: int,
    capacity: Sequence[float] | None,
    schedules: Sequence[str] | None,
) -> Iterator[Candidate]:
    """Simulate each schedule of a plan with a number of micro-batches.

    Args:
        batch: how many samples it has.
        plan: whose schedules they are.
        microbatches: how many.
        capacity: bytes of each device; None doesn't look at memory.
        schedules: those that may be taken; None is all.
    """
    sizes = share_sizes(batch, microbatches)
    forward = []
    backward = []
    kept = {}
    whole = 0.0
    cut = 0.0
    for stage, cost in enumerate(plan.costs):
        forward.append([at(cost.forward, size) for size in sizes])
        backward.append([at(cost.backward, size) for size in sizes])
        kept[stage] = cost.kept * sizes[0]
        whole += at(cost.forward, batch) + at(cost.backward, batch)
        cut += sum(forward[stage]) + sum(backward[stage])
    cutting = 1.0
    if whole:
        cutting = cut / whole
    room = capacity or [math.inf] * plan.devices
    for name, schedule in plan.schedules(microbatches).items():
        if schedules is not None and name not in schedules:
            continue
        timeline = simulate(schedule, forward, backward)
        peak = list(timeline.held(kept))
        for device, cost in zip(plan.places, plan.costs, strict=True):
            peak[device] += cost.fixed
        filled = []
        for need, there in zip(peak, room, strict=True):
            filled.append(need / max(there, 1.0))
        yield Candidate(plan, name, microbatches, timeline, tuple(peak), tuple(filled), cutting)


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
    with alone(tuple(devices[:1])) as world:
        bench = ModelBenchmark(job, world)
        by_size, too_small = _measured_at_sizes(bench, seconds)
    batch = bench.first.size
    near = max(1, batch // _NEAR_CUT)
    if near not in by_size:  # the model can't take it
        near = min(by_size)
    blocks = by_size[near]
    plans: list[Plan] = []
    partitions: dict[tuple[int, ...], Partition] = {}  # by the places of a plan's stages
    for each in chunks:
        stages = each * len(devices)
        is_further = bool(plans) and device_map is None
        if is_further and (stages > len(blocks.blocks) or len(devices) == 1):
            continue
        places = tuple(stage % len(devices) for stage in range(stages))
        # What is held is looked at by the simulation, which knows the schedule.
        of_stages = [devices[place] for place in places]
        found = divided(bench, blocks, near, of_stages, given=device_map)
        partitions[places] = found
        plans.append(Plan(places, _costs(bench, by_size, found)))
    # A batch is in no more micro-batches than it has samples, whatever was asked for.
    numbers = sorted({min(number, batch) for number in microbatches})
    possible = [number for number in numbers if batch // number > too_small]
    if not possible:
        # They were asked for, and the first update says what is wrong with them.
        possible = numbers
    choice = choose_schedule(
        batch,
        plans,
        capacity=capacity,
        schedules=schedules,
        microbatches=possible,
    )
    return partitions[choice.best.plan.places], choice


def _measured_at_sizes(bench: ModelBenchmark, seconds: float) -> tuple[dict[int, ModelBlocks], int]:
    """Measure the blocks by the samples of a micro-batch, and the first size that the model can't
    take (0: none).

    Args:
        bench: the model.
        seconds: how long to measure, for each size.
    """
    whole = bench.first.size
    near = max(1, whole // _NEAR_CUT)
    small = max(1, whole // _SMALL_CUT)
    by_size: dict[int, ModelBlocks] = {}
    for size in sorted({whole, near, small}, reverse=True):
        try:
            part = bench.part(size)
            by_size[size] = bench.blocks(part, seconds=seconds)
        except Exception:
            if size == whole:
                raise
            return by_size, size  # BatchNorm, say, has nothing to normalise over in one sample
    return by_size, 0


def _costs(
    bench: ModelBenchmark,
    by_size: Mapping[int, ModelBlocks],
    found: Partition,
) -> tuple[Costs, ...]:
    """Sum what each stage of a partition costs, at each size with which forward goes the same way.

    Args:
        bench: the model.
        by_size: its blocks by the samples of a micro-batch.
        found: the partition.
    """
    names = {block.name for block in found.blocks}
    same: dict[int, dict[str, Block]] = {}
    for size, of_size in by_size.items():
        by_name = {block.name: block for block in of_size.blocks}
        if set(by_name) == names:
            same[size] = by_name
    costs = []
    for stage in found.stages:
        forward = {}
        backward = {}
        for size, by_name in same.items():
            own = [by_name[block.name] for block in stage.blocks]
            forward[size] = sum(block.forward for block in own)
            backward[size] = sum(block.backward for block in own)
        kept = stage.activations / found.samples
        fixed = sum(bench.fixed(block) for block in stage.blocks)
        cost = Costs(forward, backward, kept, fixed)
        costs.append(cost)
    return tuple(costs)
