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
from lockstep.pipelining.runner import Runner
from lockstep.profiling.time_breakdown import StepTimes, Track
from lockstep.strategies.steps.step import Step


@dataclass
class _Place:
    """Where a thread is.

    Attributes:
        times: what the thread notes.
        inner: for each open phase, the seconds that belong to phases inside it.
    """

    times: StepTimes
    inner: list[float] = field(default_factory=list)

    def took(self, seconds: float) -> None:
        """Note that a part of the open phase took so long, and belongs to something else."""
        if self.inner:
            self.inner[-1] += seconds


class Clock(Observer):
    """Notes when this process's threads begin and end what, while it is ``observing`` the
    updates of a step.

    Args:
        step: whose updates are clocked.

    Attributes:
        track: of the thread that runs the loop.
        overlaps: whether gradients were summed while backward ran.
        whose: what has a track; threads have one where they compute.
    """

    def __init__(self, step: Step) -> None:
        world = step.world
        self._world = world
        self.track = Track(world.rank, str(world.device))
        self.overlaps = False
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
        self._took: dict[int, float] = {}  # the seconds of each replica
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
        observers = self._world.observers
        observers.append(self)
        try:
            yield
        finally:
            observers.remove(self)
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
        """Open a step, for the loop and for each thread that has a track."""
        self._began = now()
        self._here.place = _Place(StepTimes())
        self._took = {}
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

        if self.whose == "replica":
            self._wait_for_slowest()
        for track in self._threads:
            _add_those_of_loop(track.steps[-1], times)

    def _wait_for_slowest(self) -> None:
        """Note how long each replica waits for the slowest one; one without a share only waits."""
        slowest = max(self._took.values(), default=0.0)
        for number, track in enumerate(self._threads):
            waited = slowest - self._took.get(number, 0.0)
            track.steps[-1].add("waiting", "slowest replica", waited)

    def forget_step(self) -> None:
        """Drop the step that is open, where one is: it didn't come to its end."""
        if self._began is None:
            return
        self._close()
        for track in self._threads:
            track.steps.pop()

    def _close(self) -> None:
        """End what `over` opened: the step, and its name in the trace."""
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

        Args:
            kind: what its time counts as.
            name: of the phase, in the summary and in the trace.
        """
        place = self._place
        if place is None:  # its work is part of what waits for it
            yield
            return
        self.wait()
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
    def stages(self) -> Iterator[None]:
        """Note what the stages of the devices compute, while this thread waits for them."""
        began = now()
        yield
        runner = self._runner
        if runner is None:
            return
        is_queued = self.whose == "rank" and runner.overlaps
        busy = runner.busy
        if not busy and not is_queued:
            return
        self.wait()
        seconds = now() - began
        place: _Place = self._here.place
        place.took(seconds)
        if is_queued:  # on accelerators, by threads that have no times of their own
            place.times.add("computing", "stages", seconds)
        for track, computed in zip(self._threads, busy, strict=False):
            own = track.steps[-1]
            own.add("computing", "stages", computed)
            own.add("waiting", "other stages", max(0.0, seconds - computed))

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[None]:
        """Note what a replica computes, on its own thread.

        Args:
            number: of the replica, among those of this process.
        """
        track = self._threads[number]
        self._here.place = _Place(track.steps[-1])
        began = now()
        try:
            with record_function(f"replica {number}"):
                yield
                self.wait()
        finally:
            self._took[number] = now() - began
            del self._here.place

    @contextlib.contextmanager
    def backward(self, total: torch.Tensor, *, sums: bool) -> Iterator[None]:
        """Note what remains to be summed when backward's own work is done: PyTorch's reducer sums
        while backward runs.

        The reducer waits for its sums in a callback at the end of backward. A callback that was
        queued before it runs before it.

        Args:
            total: the tensor that backward begins at.
            sums: whether gradients are summed in this backward.
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
            place: _Place = self._here.place
            seconds = now() - computed[0]
            place.times.add("communicating", "reduce", seconds)
            place.took(seconds)
            self.overlaps = True


def _add_those_of_loop(own: StepTimes, times: StepTimes) -> None:
    """Add the times of the loop to those of a device.

    Args:
        own: of the device, in one step.
        times: of the loop, in the same step.
    """
    own.wall = times.wall
    for (kind, phase), seconds in times.spent.items():
        own.add(kind, phase, seconds)
