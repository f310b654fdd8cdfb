"""The clock of a profile: what each thread of this process does when, in one step after another.

It is an observer of the steps that it clocks. No other step has one, so a training without a
profile has nothing of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic as now
from typing import Any

import torch
from torch.autograd import Variable
from torch.profiler import record_function

from lockstep.data import Batch
from lockstep.launch.observer import Kind, Observer
from lockstep.pipelining.planner.simulate import ideal
from lockstep.pipelining.runner import Runner
from lockstep.pipelining.timeline import Timeline
from lockstep.profiling.time_breakdown import StepTimes, Track
from lockstep.strategies.steps.step import Step


@dataclass
class _Place:
    """Where a thread is.

    Attributes:
        times: what the thread notes.
        inner: for each open phase, the seconds that belong to phases inside it.
        is_in_collective: whether it communicates.
    """

    times: StepTimes
    inner: list[float] = field(default_factory=list)
    is_in_collective: bool = False

    def took(self, seconds: float) -> None:
        """Note that a part of the open phase took so long, and belongs to something else."""
        if self.inner:
            self.inner[-1] += seconds


class Clock(Observer):
    """Notes when this process's threads begin and end what, while it is ``observing`` the
    updates of a step.

    Attributes:
        track: of the thread that runs the loop.
        overlaps: whether gradients were summed while backward ran.
        timelines: by title, when stages computed, once it has observed.
        whose: what has a track; threads have one where they compute.
    """

    def __init__(self, step: Step) -> None:
        self._world = world = step.world
        self.track = Track(world.rank, str(world.device))
        self.overlaps = False
        self.timelines: dict[str, Timeline] = {}
        self.whose = step.timed
        self._runner: Runner | None = getattr(step, "runner", None)
        self._threads: list[Track] = []
        if self.whose != "rank":
            before = world.rank * len(world.devices)
            for number, device in enumerate(world.devices, before):
                self._threads.append(Track(number, str(device)))
        self._on_accelerator = not world.device.is_slot
        self._here = threading.local()
        self._began: float | None = None
        self._stays: dict[int, tuple[float, float]] = {}  # when each replica began, and was done
        self._named: Any = None

    @property
    def replicas(self) -> list[Track]:
        """A track for each device that this process drives: the time of its own thread, and of
        the loop.
        """
        return self._threads or [self.track]

    @property
    def _place(self) -> _Place | None:
        """Where this thread is; None for a thread without a track, such as autograd's."""
        return getattr(self._here, "place", None)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Be among the step's observers meanwhile; a step that is open at the end is forgotten."""
        runner = self._runner
        self._world.observers.append(self)
        if runner is not None:
            runner.timelines = []
        try:
            yield
        finally:
            self._world.observers.remove(self)
            if runner is not None:
                whose = ", rank 0" if self._world.size > 1 else ""
                self.timelines = _timelines_of(runner, whose)
                runner.timelines = None
            self.forget_step()

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches; a step begins with asking for its batch, and ends when the next
        one is asked for.
        """
        while True:
            self._begin_step()
            with self.phase("loading", "load"):
                batch = next(batches, None)
            if batch is None:
                self.forget_step()
                return
            self._named = record_function(f"step {self._world.step + 1}")
            self._named.__enter__()
            yield batch
            self.end_step()

    def _begin_step(self) -> None:
        self._began = now()
        self._here.place = _Place(StepTimes())
        self._stays = {}
        for track in self._threads:
            track.steps.append(StepTimes())

    def end_step(self) -> None:
        """End the step, where one is open."""
        if self._began is None:
            return
        self.wait()
        times = self._here.place.times
        times.wall = now() - self._began
        self._close()
        self.track.steps.append(times)

        is_replica = self.whose == "replica"
        begins = [begun for begun, _ in self._stays.values()]
        ends = [done for _, done in self._stays.values()]
        first = min(begins, default=0.0)
        slowest = max(ends, default=0.0)
        for number, track in enumerate(self._threads):
            own = track.steps[-1]
            own.wall = times.wall
            if is_replica:
                _, done = self._stays.get(number, (first, first))  # without a share it only waits
                own.add("waiting", "slowest replica", slowest - done)
            _add_those_of_loop(own, times)

    def forget_step(self) -> None:
        """Drop the step that is open, where one is: it didn't come to its end."""
        if self._began is None:
            return
        self._close()
        for track in self._threads:
            track.steps.pop()

    def _close(self) -> None:
        self._began = None
        if self._named is not None:
            self._named.__exit__(None, None, None)
            self._named = None

    def wait(self) -> None:
        """Wait until accelerators have done all that was asked of them, so that the time is that
        of the phase.
        """
        if self._on_accelerator:
            for device in self._world.devices:
                torch.accelerator.synchronize(device.torch)

    @contextlib.contextmanager
    def phase(self, kind: Kind, name: str) -> Iterator[None]:
        """Note what this thread does now. Phases may lie inside one another; each has what its
        inner ones leave.
        """
        place = self._place
        if place is None:  # its work is part of what waits for it
            yield
            return
        began = now()
        place.inner.append(0.0)
        try:
            with record_function(name):
                yield
                self.wait()
        finally:
            whole = now() - began
            place.times.add(kind, name, whole - place.inner.pop())
            place.took(whole)

    @contextlib.contextmanager
    def collective(self, name: str, parties: int) -> Iterator[None]:
        """Note what the first ``parties`` ranks, or replicas, do together."""
        place = self._place
        if place is None or place.is_in_collective:
            yield
            return
        place.is_in_collective = True
        try:
            with record_function(name):
                self.wait()
                entered = now()
                yield
                self.wait()
        finally:
            place.is_in_collective = False
        self._was_in(name, parties, entered)

    def _was_in(self, name: str, parties: int, entered: float) -> None:
        """Note that this thread has left a collective that it entered at that moment."""
        place: _Place = self._here.place
        left = now()
        place.times.collectives.setdefault((name, parties), []).append((entered, left))
        place.took(left - entered)

    @contextlib.contextmanager
    def stages(self) -> Iterator[None]:
        """Note what the stages of the devices compute, while this thread waits for them."""
        began = now()
        yield
        runner = self._runner
        if runner is None:
            return
        is_queued = self.whose == "rank" and runner.overlaps
        if not runner.timelines and not is_queued:
            return
        self.wait()
        seconds = now() - began
        place: _Place = self._here.place
        place.took(seconds)
        if is_queued:  # on accelerators, by threads that have no times of their own
            place.times.add("computing", "stages", seconds)
        if runner.timelines:
            for track, computed in zip(self._threads, runner.timelines[-1].busy, strict=True):
                own = track.steps[-1]
                own.add("computing", "stages", computed)
                own.add("waiting", "other stages", max(0.0, seconds - computed))

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """Note what a replica computes, on its own thread."""
        self._here.place = _Place(self._threads[number].steps[-1])
        began = now()
        try:
            with record_function(f"replica {number}"):
                yield
                self.wait()
        finally:
            self._stays[number] = began, now()
            del self._here.place

    @contextlib.contextmanager
    def backward(self, total: torch.Tensor, *, sums: bool) -> Iterator[None]:
        """Note what remains to be summed when backward's own work is done, as a collective:
        PyTorch's reducer sums while backward runs.

        The reducer waits for its sums in a callback at the end of backward. A callback that was
        queued before it runs before it.
        """
        if not sums:
            yield
            return
        computed: list[float] = []

        def note() -> None:
            if self._on_accelerator:
                torch.accelerator.current_stream().synchronize()
            computed.append(now())

        def begun(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(note)

        hook = total.register_hook(begun)  # type: ignore[no-untyped-call]
        yield
        hook.remove()
        if computed:
            self.wait()
            self._was_in("reduce", self._world.size, computed[0])
            self.overlaps = True


def _add_those_of_loop(own: StepTimes, times: StepTimes) -> None:
    """Add the times of the loop to those of a device."""
    for (kind, phase), seconds in times.spent.items():
        own.add(kind, phase, seconds)
    for (name, parties), stays in times.collectives.items():
        if parties > 1:  # the wait for another rank is part of it
            for entered, left in stays:
                own.add("communicating", name, left - entered)


def _timelines_of(runner: Runner, whose: str) -> dict[str, Timeline]:
    """Return when each stage computed in the update of middle length, and when it ideally would
    have; empty where nothing was noted.

    Args:
        runner: of the pipeline.
        whose: the end of the title of what was measured, where each rank has its own.
    """
    noted = [timeline for timeline in runner.timelines or () if any(timeline.devices)]
    if not noted:
        return {}
    noted.sort(key=lambda timeline: timeline.makespan)
    usual = noted[(len(noted) - 1) // 2]
    count = _microbatches(usual)
    alike = [timeline for timeline in noted if _microbatches(timeline) == count]
    return {
        f"measured{whose}": usual,
        "ideal, with the same stage times": ideal(runner.schedule(count), alike),
    }


def _microbatches(timeline: Timeline) -> int:
    """Return the number of micro-batches of an update."""
    return 1 + max(span.action.microbatch for spans in timeline.devices for span in spans)
