"""The choice of schedule and number of micro-batches, by simulation, and why.

More micro-batches wait less, but cutting a batch costs: small operators are slower for each sample. So each stage's
time is known for two sizes of micro-batch or more, and is taken to be a straight line between them::

    time of a stage for n samples  =  a + b n        a: what each micro-batch costs, however small

Every schedule is simulated with every number of micro-batches; what doesn't fit into the devices' memory is left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import StrategyError, counted
from lockstep.pipelining.planner.balanced_split import size as said
from lockstep.pipelining.planner.simulate import fitted, simulate
from lockstep.pipelining.schedule import Schedule, gpipe, interleaved, one_f_one_b
from lockstep.report.timeline import Timeline
from lockstep.tensors.pytree import share_sizes

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The micro-batches that are tried."""

_NEAR = 1.01
"""What is slower than the fastest by no more than that is as good, and then the one that holds less is taken."""


@dataclass(frozen=True)
class Costs:
    """What one stage costs.

    Attributes:
        forward: seconds by the samples of a micro-batch, for two sizes or more (one: in proportion to samples).
        backward: likewise.
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
        places: for each stage the device that holds it.
        costs: of each stage.
        turn: seconds that each turn of a stage takes beyond its costs, where micro-batches overlap.
    """

    places: tuple[int, ...]
    costs: tuple[Costs, ...]
    turn: float = 0.0

    @property
    def devices(self) -> int:
        """How many."""
        return max(self.places) + 1

    def schedules(self, microbatches: int) -> Iterator[tuple[str, Schedule | None]]:
        """The schedules that this plan can have; None is to be fitted to the times."""
        if self.places == tuple(range(self.devices)):
            yield "1f1b", one_f_one_b(self.devices, microbatches)
            yield "gpipe", gpipe(self.devices, microbatches)
        elif self.places == tuple(s % self.devices for s in range(len(self.places))):
            yield "interleaved", interleaved(self.devices, microbatches, len(self.places) // self.devices)
        yield "fitted", None


@dataclass(frozen=True)
class Candidate:
    """One schedule with one number of micro-batches, simulated.

    Attributes:
        plan: which of the plans.
        schedule: its name.
        microbatches: of a global batch.
        order: the schedule itself.
        timeline: when what would be done.
        peak: bytes that each device holds at most.
        cutting: how many times the work of the whole batch its micro-batches take together, with what turns cost.
        fits: whether that is within each device's memory.
    """

    plan: Plan
    schedule: str
    microbatches: int
    order: Schedule
    timeline: Timeline
    peak: tuple[float, ...]
    cutting: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Of forward and backward of a global batch."""
        return self.timeline.makespan

    def corrected(self, plan: Plan, taken: float) -> Plan:
        """A plan with turns that cost as much as it takes for this candidate to last so many seconds, as it did."""
        return replace(plan, turn=self.plan.turn + (taken - self.seconds) / max(map(len, self.order)))

    @property
    def name(self) -> str:
        """What tells it from all others: ``interleaved with 4 micro-batches, 6 stages``."""
        return f"{self}, {counted(len(self.plan.places), 'stage')}"

    def __str__(self) -> str:
        return f"{self.schedule} with {counted(self.microbatches, 'micro-batch', 'es')}"


@dataclass(frozen=True)
class Choice:
    """The best candidate.

    Attributes:
        best: what to take.
        samples: of a global batch.
        candidates: all of them, the fastest first.
    """

    best: Candidate
    samples: int
    candidates: tuple[Candidate, ...]

    @property
    def why(self) -> str:
        """A sentence or two."""
        best = self.best
        whole = best.seconds * best.timeline.speed_up / best.cutting
        why = (
            f"{best}: {best.seconds * 1e3:.3g} ms of forward and backward for {counted(self.samples, 'sample')}, "
            f"{whole / best.seconds:.3g} times as fast as one device with the whole batch "
            f"(bubble {100 * best.timeline.bubble:.1f} %, cutting and overlapping cost {best.cutting:.2f})"
        )
        if whole < best.seconds and best.plan.devices > 1:
            why += "; cutting costs more here than overlapping gains: one device, or larger batches, would be faster"
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
        batch: samples of a global batch.
        plans: the layouts to choose from: one stage on each device, two, ...
        capacity: bytes of each device; None doesn't look at memory.
        schedules: those that may be taken; None is all.
        microbatches: the numbers that may be taken; those above ``batch`` are not tried.

    Raises:
        StrategyError: nothing fits (both sizes are said), or there is nothing to choose from.
    """
    numbers = [m for m in microbatches if 1 <= m <= batch]
    found = [
        candidate
        for plan in plans
        for m in numbers
        for candidate in _candidates(batch, plan, m, capacity)
        if schedules is None or candidate.schedule in schedules
    ]
    if not found:
        raise StrategyError(
            f"schedule: there is nothing to choose from: {len(plans)} plans, schedules {schedules or 'all'}, "
            f"micro-batches {list(microbatches)} of a batch of {batch}"
        )
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        assert capacity is not None
        raise StrategyError(_too_large(found, capacity))
    fastest = min(candidate.seconds for candidate in fitting)
    best = min(
        (candidate for candidate in fitting if candidate.seconds <= _NEAR * fastest),
        key=lambda c: (len(c.plan.places), max(c.peak), c.microbatches, c.schedule == "fitted", c.seconds),
    )
    return Choice(best, batch, tuple(sorted(found, key=lambda c: c.seconds)))


def at(points: Mapping[int, float], samples: int) -> float:
    """The time for so many samples, on the straight line through the two nearest sizes.

    Below the smallest size it is at least in proportion to samples: a sample of a small micro-batch is never cheaper.
    """
    sizes = sorted(points)
    if samples in points:
        return points[samples]
    if len(sizes) == 1:
        return points[sizes[0]] * samples / sizes[0]
    right = min(max(bisect.bisect(sizes, samples), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = (points[high] - points[low]) / (high - low)
    # A line that would fall, by noise, is taken as level.
    value = points[low] + max(slope, 0.0) * (samples - low)
    return max(value, points[sizes[0]] * samples / sizes[0]) if samples < sizes[0] else value


def _candidates(batch: int, plan: Plan, microbatches: int, capacity: Sequence[float] | None) -> Iterator[Candidate]:
    sizes = share_sizes(batch, microbatches)
    turn = plan.turn if microbatches > 1 else 0.0  # one alone has nobody to take turns with
    forward = [[max(0.0, at(cost.forward, size) + turn) for size in sizes] for cost in plan.costs]
    backward = [[max(0.0, at(cost.backward, size) + turn) for size in sizes] for cost in plan.costs]
    whole = sum(at(cost.forward, batch) + at(cost.backward, batch) for cost in plan.costs)
    cutting = sum(map(sum, [*forward, *backward])) / whole if whole else 1.0
    for name, order in plan.schedules(microbatches):
        order = order or fitted(plan.places, microbatches, forward, backward)
        timeline = simulate(order, forward, backward)
        peak = list(timeline.held({stage: cost.kept * sizes[0] for stage, cost in enumerate(plan.costs)}))
        for device, cost in zip(plan.places, plan.costs, strict=True):
            peak[device] += cost.fixed
        fits = capacity is None or all(need <= there for need, there in zip(peak, capacity, strict=True))
        yield Candidate(plan, name, microbatches, order, timeline, tuple(peak), cutting, fits)


def _too_large(found: Sequence[Candidate], capacity: Sequence[float]) -> str:
    """What is wrong with the candidate that comes nearest to fitting."""

    def over(candidate: Candidate) -> list[float]:
        return [need / max(there, 1.0) for need, there in zip(candidate.peak, capacity, strict=True)]

    nearest = min(found, key=lambda candidate: max(over(candidate)))
    device = over(nearest).index(max(over(nearest)))
    return (
        f"schedule: nothing fits: {nearest} needs {said(nearest.peak[device])} on device {device}, which has "
        f"{said(capacity[device])}: use more devices, a smaller batch_size, or activation_checkpointing"
    )
