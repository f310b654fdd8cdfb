"""The clock of a profile: what each thread of this process does when, in one step after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from lockstep.data import Batch
from lockstep.launch.world import now
from lockstep.profiling.time_breakdown import Kind, StepTimes, Track
from lockstep.strategies.step import Step


@dataclass
class _Place:
    """Where a thread is: whose times it notes, and for each open phase the time that belongs to inner ones."""

    times: StepTimes
    inner: list[float] = field(default_factory=list)
    is_in_collective: bool = False


class Clock:
    """Notes when this process's threads begin and end what."""

    def __init__(self, step: Step) -> None:
        self._world = world = step.world
        self.track = Track(world.rank, str(world.device))  # of the thread that runs the loop
        self.overlaps = False  # whether a sum ran inside of a backward
        words = step.profiled.values()
        # What has a track: threads do where they compute.
        self.whose = "replica" if "replica" in words else "device" if "stages" in words else "rank"
        devices = () if self.whose == "rank" else world.devices
        self._threads = [Track(i, str(device)) for i, device in enumerate(devices)]
        self._on_accelerator = not world.device.is_slot
        self._here = threading.local()
        self._began: float | None = None
        self._stays: dict[int, tuple[float, float]] = {}  # when each replica began, and was done
        self._named: Any = None

    @property
    def replicas(self) -> list[Track]:
        """A track for each device that this process drives: its own thread's time, and the loop's."""
        return self._threads or [self.track]

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; a step begins with asking for its batch, and ends when the next is asked for."""
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
        """On an accelerator: until all that was asked of it is done, so that the time is its own."""
        if self._on_accelerator:
            torch.accelerator.synchronize()

    @contextlib.contextmanager
    def phase(self, kind: Kind, name: str) -> Iterator[None]:
        """What this thread does now. Phases may lie inside one another; each has what its inner ones leave."""
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
        self.was_in(name, parties, entered)

    def was_in(self, name: str, parties: int, entered: float) -> None:
        """This thread has left a collective that it entered at that moment."""
        place: _Place = self._here.place
        left = now()
        place.times.collectives.setdefault((name, parties), []).append((entered, left))
        if place.inner:
            place.inner[-1] += left - entered

    def stages(self, seconds: float, busy: Sequence[float]) -> None:
        """The devices' stages have computed for so long each, in a time in which this thread waited for them."""
        place: _Place = self._here.place
        if place.inner:
            place.inner[-1] += seconds
        for track, computed in zip(self._threads, busy, strict=True):
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
