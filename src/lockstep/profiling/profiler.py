"""The steps that are profiled, the trace of each rank, and the report.

While these steps run, a clock is among their observers::

    step    1   2 | 3   4   ...   12 | 13 ...
          warm-up |     profiled     | as if nothing had been

A profile never crosses the end of an epoch, so evaluation and saving are not in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from typing import Any

from torch.profiler import profile, supported_activities

from lockstep.data import Batch
from lockstep.errors import SaveError
from lockstep.launch.world import World
from lockstep.profiling.clock import Clock
from lockstep.profiling.profile_table import lines_of
from lockstep.profiling.time_breakdown import Track, times_of
from lockstep.run.events import Line
from lockstep.run.run_folder import RunFolder
from lockstep.strategies.steps.step import Step

WARM_UP = 2
"""Steps before the profile: the first ones build what later ones have."""

STEPS = 10
"""Steps of a profile, unless the epoch or the training ends before."""


class Profiler:
    """Profiles some steps of a training on this rank; each rank has one.

    Traces and ``summary.json`` go to the run's folder.

    Args:
        world: of this rank.
        step: whose updates are profiled.
        folder: of the run.
        steps: of the training, where that is known; a short one has fewer warm-up steps.
    """

    def __init__(self, world: World, step: Step, folder: RunFolder, steps: int | None) -> None:
        self._world = world
        step.sums.last = 1  # none in the steps that are profiled
        self._folder = folder
        self._warm_up = WARM_UP
        if steps is not None:
            self._warm_up = max(0, min(WARM_UP, steps - 1))
        self._clock = Clock(step)
        self._observing = contextlib.ExitStack()
        self._trace: profile | None = None
        self._done = False
        if world.is_first:
            shutil.rmtree(folder.profile, ignore_errors=True)  # of an earlier part of this run

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *of_an_error: object) -> None:
        self._stop()
        world = self._world
        if kind is None and not self._done and world.is_first:
            world.emit(Line.note(f"no profile: the training ended after step {world.step}"))

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same batches; some of the steps between them are profiled.

        Args:
            batches: of an epoch, or of what is left of it.
        """
        for batch in itertools.islice(batches, self._warm_up):
            self._warm_up -= 1
            yield batch
        if not self._done and not self._warm_up:
            self._begin()
            yield from itertools.islice(self._clock.over(batches), STEPS)
            self._clock.end_step()
            if len(self._clock.track.steps) == STEPS:
                self._finish()
        yield from batches

    def end_epoch(self) -> None:
        """End a profile that has begun: the epoch's last step is done. Every rank calls this."""
        self._clock.end_step()
        if self._done:
            return
        if self._clock.track.steps:
            self._finish()
        elif self._trace is not None:
            self._stop()  # it had begun at the very end of the epoch
            self._trace = None

    def _begin(self) -> None:
        """Start the trace of this rank, and let the clock observe the steps that follow."""
        # Kineto logs to standard error that it begins and ends, unless that is switched off before
        # its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        wanted = {"CPU", self._world.device.type.upper()}
        activities = [one for one in supported_activities() if one.name in wanted]  # type: ignore[no-untyped-call]
        threads = _all_threads(len(self._world.devices))
        self._trace = profile(activities=activities, experimental_config=threads, acc_events=True)
        self._trace.start()
        self._observing.enter_context(self._clock.observing())

    def _stop(self) -> None:
        """Stop observing, and the trace, where they have begun."""
        self._observing.close()
        if self._trace is not None and not self._done:
            self._trace.stop()

    def _finish(self) -> None:
        """Write this rank's trace; compare the clocks of all ranks, and log them. Every rank calls
        this.
        """
        self._stop()
        self._done = True
        world = self._world
        clock = self._clock
        self._save()
        tracks: list[Track] = []
        for of_rank in world.gather_objects(clock.replicas):
            tracks += of_rank
        if not world.is_first:
            return

        folder = self._folder.profile
        summary = {
            "first_step": world.step - len(clock.track.steps) + 1,
            "last_step": world.step,
            f"{clock.whose}s": times_of(tracks, clock.whose),
            "notes": self._notes(),
        }
        self._folder.write_json(folder / "summary.json", summary)
        for line in lines_of(summary, clock.whose, os.path.relpath(folder)):
            world.emit(Line(line))

    def _save(self) -> None:
        """Write this rank's trace.

        Raises:
            SaveError: it can't be written.
        """
        assert self._trace is not None
        folder = self._folder.profile
        path = folder / f"rank{self._world.rank}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(path))
        except OSError as error:
            reason = error.strerror or error
            raise SaveError(f"{folder}: the profile could not be written: {reason}") from error
        self._trace = None

    def _notes(self) -> list[str]:
        """Return what should be known to read the numbers."""
        whose = self._clock.whose
        notes = []
        if whose in _WAITING:
            meaning = _WAITING[whose]
            notes.append(f"waiting: {meaning}; computing: waiting for Python's lock too")
        if self._clock.overlaps:
            notes.append(
                "communicating: only what backward did not hide (sums run while it computes)"
            )
        if not self._world.device.is_slot:
            notes.append(
                "each phase waits for the device, so these steps are slower than without --profile"
            )
        return notes


_WAITING = {
    "replica": "a replica that is done before the slowest",
    "device": "for the results of another device's layers",
}
"""What waiting means, by what has a track."""


def _all_threads(devices: int) -> Any:
    """Return the setting of a trace that has the threads of replicas, where this torch has one.

    Args:
        devices: how many this process drives; with one there are no such threads.
    """
    if devices == 1:
        return None
    with contextlib.suppress(ImportError, TypeError):
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(profile_all_threads=True)
    return None
