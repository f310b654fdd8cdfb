"""The clock of a profile: what each thread of this process does when, in one step after another.

It is an observer of the steps that it clocks. No other step has one, so a training without a
profile has nothing of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable
from torch.profiler import record_function

from lockstep.data import Batch
from lockstep.launch.observer import Kind, Observer
from lockstep.launch.world import now
from lockstep.pipelining.planner.simulate import ideal
from lockstep.pipelining.runner import Runner
from lockstep.profiling.time_breakdown import StepTimes, Track
from lockstep.report.timeline import Timeline
from lockstep.strategies.steps.step import Step


@dataclass
class _Place:
    """Where a thread is: whose times it notes, and for each open phase the time that belongs to
    inner ones.
    """

    times: StepTimes
    inner: list[float] = field(default_factory=list)
    is_in_collective: bool = False


class Clock(Observer):
    """Notes when this process's threads begin and end what, while it is ``observing`` the
    updates of a step.
    """

    def __init__(self, step: Step) -> None:
        self._world = world = step.world
        self.track = Track(world.rank, str(world.device))  # of the thread that runs the loop
        self.overlaps = False  # whether a sum ran inside of a backward
        self._runner: Runner | None = getattr(step, "runner", None)
        self.timelines: dict[
            str, Timeline
        ] = {}  # by title, when stages computed, once it has observed
        self.whose = step.timed  # what has a track: threads do where they compute
        devices = () if self.whose == "rank" else world.devices
        before = world.rank * len(devices)
        self._threads = [Track(before + i, str(device)) for i, device in enumerate(devices)]
        self._on_accelerator = not world.device.is_slot
        self._here = threading.local()
        self._began: float | None = None
        self._stays: dict[int, tuple[float, float]] = {}  # when each replica began, and was done
        self._named: Any = None

    @property
    def replicas(self) -> list[Track]:
        """A track for each device that this process drives: its own thread's time, and the
        loop's.
        """
        return self._threads or [self.track]

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Meanwhile it is among the step's observers; a step that is open at the end is
        forgotten.
        """
        self._world.observers.append(self)
        if self._runner is not None:
            self._runner.timelines = []
        try:
            yield
        finally:
            self._world.observers.remove(self)
            if self._runner is not None:
                self.timelines = _timelines_of(
                    self._runner, ", rank 0" if self._world.size > 1 else ""
                )
                self._runner.timelines = None
            self.forget_step()

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; a step begins with asking for its batch, and ends when the next is
        asked for.
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
        """The step ends here, where one is open."""
        if self._began is None:
            return
        self.wait()
        times = self._here.place.times
        times.wall = now() - self._began
        self._close()
        self.track.steps.append(times)
        if not self._threads:
            return
        first = min((begun for begun, _ in self._stays.values()), default=0.0)
        slowest = max((done for _, done in self._stays.values()), default=0.0)
        for i, track in enumerate(self._threads):
            own = track.steps[-1]
            own.wall = times.wall
            done = self._stays[i][1] if i in self._stays else first  # without a share it only waits
            if self.whose == "replica":
                own.add("waiting", "slowest replica", slowest - done)
            for (kind, phase), seconds in times.spent.items():
                own.add(kind, phase, seconds)
            for (name, parties), stays in times.collectives.items():
                if parties > 1:  # (a wait for another rank is in it)
                    own.add("communicating", name, sum(left - entered for entered, left in stays))

    def forget_step(self) -> None:
        """No step came to its end, where one is open."""
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
        """On an accelerator: until all that was asked of it is done, so that the time is its
        own.
        """
        if self._on_accelerator:
            for device in self._world.devices:
                torch.accelerator.synchronize(device.torch)

    @contextlib.contextmanager
    def phase(self, kind: Kind, name: str) -> Iterator[None]:
        """What this thread does now. Phases may lie inside one another; each has what its inner
        ones leave.
        """
        place: _Place | None = getattr(self._here, "place", None)
        if place is None:  # a thread of autograd's, say: its work is part of what waits for it
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
            if place.inner:
                place.inner[-1] += whole

    @contextlib.contextmanager
    def collective(self, name: str, parties: int) -> Iterator[None]:
        """What the first so many ranks, or replicas, do together."""
        place: _Place | None = getattr(self._here, "place", None)
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
        """This thread has left a collective that it entered at that moment."""
        place: _Place = self._here.place
        left = now()
        place.times.collectives.setdefault((name, parties), []).append((entered, left))
        if place.inner:
            place.inner[-1] += left - entered

    @contextlib.contextmanager
    def stages(self) -> Iterator[None]:
        """The devices' stages compute, and this thread waits for them."""
        began = now()
        yield
        timelines = self._runner.timelines if self._runner is not None else None
        is_queued = self.whose == "rank" and self._runner is not None and self._runner.overlaps
        if not timelines and not is_queued:
            return
        self.wait()
        seconds = now() - began
        place: _Place = self._here.place
        if place.inner:
            place.inner[-1] += seconds
        if is_queued:  # on accelerators, by threads that have no times of their own
            place.times.add("computing", "stages", seconds)
        for track, computed in zip(
            self._threads, timelines[-1].busy if timelines else (), strict=True
        ):
            track.steps[-1].add("computing", "stages", computed)
            track.steps[-1].add("waiting", "other stages", max(0.0, seconds - computed))

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """This thread computes a replica's share."""
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
        """PyTorch's reducer sums while backward runs; what is left when backward's own work is done
        is a collective.

        The reducer waits for it in a callback at the end of backward, and one that was asked for
        before the reducer's runs before it.
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


def _timelines_of(runner: Runner, whose: str) -> dict[str, Timeline]:
    """When each stage computed in a usual update, and when it ideally would have; empty where
    nothing was noted.

    Usual is the one of middle length, among those with as many micro-batches as most have.
    ``whose`` ends the title of what was measured, where each rank has its own.
    """
    noted = [timeline for timeline in runner.timelines or () if any(timeline.devices)]
    if not noted:
        return {}
    counts = [
        1 + max(span.action.microbatch for mine in one.devices for span in mine) for one in noted
    ]
    count = Counter(counts).most_common(1)[0][0]
    equal = [timeline for timeline, its in zip(noted, counts, strict=True) if its == count]
    middle = sorted(equal, key=lambda timeline: timeline.makespan)[(len(equal) - 1) // 2]
    return {
        f"measured{whose}": middle,
        "ideal, with the same stage times": ideal(runner.schedule(count), equal),
    }
