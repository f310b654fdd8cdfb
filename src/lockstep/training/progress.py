"""What the training loop tells of itself: events, the pace, and the memory that it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lockstep.data import AnyLoader
from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.events import Event, Memory, Progress
from lockstep.launch.memory import memory_now
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World
from lockstep.strategies.result import Sums
from lockstep.strategies.step import Step


class Pace:
    """Tells the display where the training is, some times a second; ``epochs`` and ``steps`` are all, where known."""

    def __init__(self, world: World, epochs: int | None, steps: int | None) -> None:
        self._world = world
        self._epochs = epochs
        self._steps = steps
        self._began = self._last = time.perf_counter()
        self._first_step = world.step

    def show(self, epoch: int, samples: int, sums: Sums) -> None:
        """Tell, unless it was told a moment ago. Ranks other than 0 tell their memory only.

        Epochs count from 1, ``samples`` since the pace began; the loss is that of the epoch so far, total / count.
        """
        now = time.perf_counter()
        if now - self._last < (0.2 if self._world.is_first else 1.0):
            return
        self._last = now
        if not self._world.is_first:
            self._world.tell(Memory(memory_now(self._world)))
            return
        total, count = sums.read()
        elapsed = now - self._began
        step = self._world.step
        left = None if self._steps is None else (self._steps - step) * elapsed / (step - self._first_step)
        self._world.tell(
            Progress(
                epoch=epoch,
                epochs=self._epochs,
                step=step,
                steps=self._steps,
                loss=total / count if count else math.nan,
                samples_per_second=samples / elapsed,
                seconds_left=left,
                memory=memory_now(self._world),
            )
        )


class Teller:
    """Passes on what happens: to the display, to the person's functions on rank 0, to TensorBoard."""

    def __init__(self, step: Step, job: Job, folder: RunFolder, tensorboard: bool) -> None:
        self._step = step
        self._world = world = step.world
        self._functions = job.on_event if world.is_first else ()
        self._folder = str(folder.path)
        self._writer: Any = None
        if tensorboard and world.is_first:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise JobError("tensorboard: it isn't installed: pip install torch-lockstep[tensorboard]") from error
            self._writer = SummaryWriter(self._folder)

    def event(self, kind: Any, epoch: int, step: int, metrics: dict[str, float]) -> bool:
        """Tell of an event; gives whether somebody answered that the training should stop."""
        if not self._world.is_first:
            return False
        event = Event(kind, epoch, step, dict(metrics), self._folder)
        self._world.tell(event)
        if self._writer is not None and kind == "evaluated":
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        with self._step.changed_here_only("on_event"):
            answers = [function(event) for function in self._functions]
        for answer in answers:
            if answer not in (None, "stop"):
                raise JobError(f'on_event: a function answered {answer!r}; None or "stop" is expected')
        return "stop" in answers

    def close(self) -> None:
        """Write out what TensorBoard hasn't got yet."""
        if self._writer is not None:
            self._writer.close()


def held_out(loaders: Mapping[str, AnyLoader]) -> str:
    """``, 1,000 (clean) + a stream (noisy) for evaluation``."""
    said = []
    for name, loader in loaders.items():
        size = "a stream" if loader.samples is None else f"{loader.samples:,}"
        said.append(f"{size} ({name})" if name else size)
    return f", {' + '.join(said)} for evaluation" if said else ""
