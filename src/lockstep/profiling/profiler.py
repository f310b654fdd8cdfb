"""Which steps are profiled, the trace of each rank, and what is told.

While these steps run, a clock is among their observers::

    step    1   2 | 3   4   ...   12 | 13 ...
          warm-up |     profiled     | as if nothing had been

A profile never crosses the end of an epoch, so evaluation and saving are not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import profile, supported_activities

from lockstep.data import Batch
from lockstep.errors import SaveError
from lockstep.launch.events import Line, Profile
from lockstep.launch.memory import begin_step_peak, step_peak
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World
from lockstep.pipelining.planner.schedule_picture import draw, key, lines_of
from lockstep.profiling.clock import Clock
from lockstep.profiling.time_breakdown import lines_of as table_of
from lockstep.profiling.time_breakdown import times_of
from lockstep.report.timeline import Timeline
from lockstep.strategies.steps.step import Step
from lockstep.tensors.byte_size import size
from lockstep.tensors.pytree import tensors

WARM_UP = 2
"""Steps before the profile: the first ones build what later ones have."""

STEPS = 10
"""Steps of a profile, unless the epoch or the training ends before."""


class Profiler:
    """Profiles some steps of a training on this rank; each rank has one.

    Traces and ``summary.json`` go to the run's folder. A training known to be short is warmed up
    for fewer ``steps``.
    """

    def __init__(self, world: World, step: Step, folder: RunFolder, steps: int | None) -> None:
        self._world = world
        self._step = step
        step.sums.last = 1  # none in the steps that are profiled
        self._folder = folder
        self._warm_up = WARM_UP if steps is None else max(0, min(WARM_UP, steps - 1))
        self._clock = Clock(step)
        self._observing = contextlib.ExitStack()
        self._trace: profile | None = None
        self._done = False
        self._peak: int | None = None  # bytes, of the last step before those that are profiled
        if world.is_first:
            shutil.rmtree(folder.profile, ignore_errors=True)  # of an earlier part of this run

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if kind is None and not self._done and self._world.is_first:
            self._world.tell(
                Line.note(f"no profile: the training ended after step {self._world.step}")
            )

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; what happens between them is looked at."""
        for batch in itertools.islice(batches, self._warm_up):
            self._warm_up -= 1
            if not self._warm_up:
                begin_step_peak(self._world)
            yield batch
            self._peak = None if self._warm_up else step_peak(self._world)
        if not self._done and not self._warm_up:
            self._begin()
            yield from itertools.islice(self._clock.over(batches), STEPS)
            self._clock.end_step()
            if len(self._clock.track.steps) == STEPS:
                self._finish()
        yield from batches

    def end_epoch(self) -> None:
        """The epoch's last step is done: a profile that has begun ends here. Every rank calls
        this.
        """
        self._clock.end_step()
        if self._clock.track.steps and not self._done:
            self._finish()
        elif self._trace is not None and not self._done:
            self._stop()  # it had begun at the very end of the epoch
            self._trace = None

    def _begin(self) -> None:
        # Kineto says on standard error that it begins and ends, unless told otherwise before its
        # first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        wanted = {"CPU", self._world.device.type.upper()}
        activities = [one for one in supported_activities() if one.name in wanted]  # type: ignore[no-untyped-call]
        threads = _all_threads(len(self._world.devices))
        trace = profile(
            activities=activities, experimental_config=threads, acc_events=True
        )  # (of its one cycle)
        trace.start()
        self._trace = trace
        self._observing.enter_context(self._clock.observing())

    def _stop(self) -> None:
        self._observing.close()
        if self._trace is not None and not self._done:
            self._trace.stop()

    def _finish(self) -> None:
        """Write this rank's trace; lay the clocks of all ranks side by side, and tell. Every
        rank calls this.
        """
        self._stop()
        timelines = self._clock.timelines
        self._done = True
        assert self._trace is not None
        world, folder = self._world, self._folder.profile
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(folder / f"rank{world.rank}.json.gz"))
            said = _save(timelines, folder) if timelines and world.is_first else []
        except OSError as error:
            raise SaveError(
                f"{folder}: the profile could not be written: {error.strerror or error}"
            ) from error
        self._trace = None
        count = len(self._clock.track.steps)
        last = world.step
        replicas = self._clock.replicas
        whose = self._clock.whose
        tracks = [track for mine in world.gather_objects(replicas) for track in mine]
        bytes_of = world.gather_objects((_bytes_kept(self._step), self._peak))
        if not world.is_first:
            return
        found = Profile(
            first=last - count + 1,
            last=last,
            whose=whose,
            rows=times_of(tracks, one_clock=world.nodes == 1),
            notes=(*self._notes(whose), *_memory(bytes_of), *said),
            traces=tuple(f"rank{rank}.json.gz" for rank in range(world.size)),
            folder=os.path.relpath(folder),
        )
        found = dataclasses.replace(
            found,
            drawings=(
                functools.partial(table_of, found),
                *(functools.partial(lines_of, title, one) for title, one in timelines.items()),
                *((key,) if timelines else ()),
            ),
        )
        self._folder.write_json(
            folder / "summary.json",
            {
                "first_step": found.first,
                "last_step": found.last,
                f"{whose}s": [
                    {whose: row.number, "device": row.device, "step_seconds": row.step}
                    | {
                        "seconds": row.kinds,
                        "shares": {kind: s / row.step for kind, s in row.kinds.items()},
                    }
                    | {"phases": row.phases}
                    for row in found.rows
                ],
                **(
                    {"bubbles": {title: one.bubble for title, one in timelines.items()}}
                    if timelines
                    else {}
                ),
                "processes": [
                    {"bytes_kept": kept, "peak_bytes_of_a_step": peak} for kept, peak in bytes_of
                ],
                "notes": found.notes,
            },
        )
        world.tell(found)

    def _notes(self, whose: str) -> Iterator[str]:
        if whose == "replica":
            yield (
                "waiting: a replica that is done before the slowest; computing: waiting for "
                "Python's lock too"
            )
        if whose == "device":
            yield (
                "waiting: for what another device's layers have to give; computing: waiting for "
                "Python's lock too"
            )
        if self._clock.overlaps:
            yield "communicating: only what backward did not hide (sums run while it computes)"
        if self._world.nodes > 1:
            yield (
                "waiting: in a collective, longer than the rank that was in it for the shortest "
                "time"
            )
        if not self._world.device.is_slot:
            yield (
                "each phase waits for the device, so these steps are slower than without --profile"
            )


def _memory(bytes_of: Sequence[tuple[int, int | None]]) -> Iterator[str]:
    """What each process keeps, and the most that it had in a step."""
    kept, peaks = [kept for kept, _ in bytes_of], [peak for _, peak in bytes_of if peak is not None]
    text = (
        f"memory of a process: weights, gradients and the optimizer's state {_least_to_most(kept)}"
    )
    yield text + (
        f"; the peak of a step, with all that the process has, {_least_to_most(peaks)}"
        if peaks
        else ""
    )


def _least_to_most(sizes: Sequence[int]) -> str:
    least, most = size(min(sizes)), size(max(sizes))
    return least if least == most else f"{least} to {most}"


def _all_threads(devices: int) -> Any:
    """What lets a trace have the threads of replicas, where this torch can do that."""
    if devices == 1:
        return None
    with contextlib.suppress(ImportError, TypeError):
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(profile_all_threads=True)
    return None


def _save(timelines: Mapping[str, Timeline], folder: Path) -> list[str]:
    """Write them as ``timeline.json``, and ``timeline.png`` where matplotlib is; gives what
    should be said.
    """
    told = {title: one.plain() for title, one in timelines.items()}
    (folder / "timeline.json").write_text(json.dumps({"unit": "seconds", "timelines": told}))
    if find_spec("matplotlib") is None:
        return ["timeline.png needs matplotlib: pip install 'torch-lockstep[pictures]'"]
    in_ms = {title: one.times(1e3) for title, one in timelines.items()}
    draw(in_ms, folder / "timeline.png", "ms")
    return []


def _bytes_kept(step: Step) -> int:
    """Of weights, gradients and the optimizer's state of this process, between updates."""
    parts = list(step.layout.parts().values())
    state = [dict(of) for of in getattr(step.optimizer, "state", {}).values()]
    held = [
        t for t in tensors([parts, [p.grad for p in parts], state]) if t.layout is torch.strided
    ]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())
