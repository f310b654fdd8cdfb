"""What the training loop tells of itself: events, the pace, and the memory that it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lockstep.data import AnyLoader
from lockstep.data.dataset_state import has_state
from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.events import Event, Memory, Progress
from lockstep.launch.memory import memory_now
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World
from lockstep.strategies.steps.update_result import Sums
from lockstep.training.callbacks.callback import Callback, TrainingContext


class Pace:
    """Tells the display where the training is, some times a second; ``epochs`` and ``steps`` are
    all, where known.
    """

    def __init__(self, world: World, epochs: int | None, steps: int | None) -> None:
        self._world = world
        self._epochs = epochs
        self._steps = steps
        self._began = self._last = time.perf_counter()
        self._first_step = world.step
        self._interval = (
            0.2 if world.is_first and world.device.is_slot else 1.0
        )  # (an accelerator is waited for)

    def show(self, epoch: int, samples: int, sums: Sums) -> None:
        """Tell, unless it was told a moment ago. Ranks other than 0 tell their memory only.

        Epochs count from 1, ``samples`` since the pace began; the loss is that of the epoch so far,
        total / count.
        """
        now = time.perf_counter()
        if now - self._last < self._interval:
            return
        self._last = now
        if not self._world.is_first:
            self._world.tell(Memory(memory_now(self._world)))
            return
        total, count = sums.read()
        elapsed = now - self._began
        step = self._world.step
        left = (
            None
            if self._steps is None
            else (self._steps - step) * elapsed / (step - self._first_step)
        )
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


class Teller(Callback):
    """Passes on what happens, on rank 0: to the records, TensorBoard, the display, and the
    person's functions.
    """

    def __init__(self, world: World, job: Job, folder: RunFolder) -> None:
        self._folder = folder
        self._functions: list[Any] = list(job.on_event) if world.is_first else []
        self._tensorboard = job.tensorboard and world.is_first
        self._writer: Any = None

    def on_start(self, training: TrainingContext) -> None:
        """Told as ``"started"``."""
        if self._tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise JobError(
                    "tensorboard: it isn't installed: pip install torch-lockstep[tensorboard]"
                ) from error
            self._writer = SummaryWriter(
                str(training.folder), purge_step=training.step + 1 if training.step else None
            )
        self._tell("started", training)

    def on_logged(self, training: TrainingContext) -> None:
        """Told as ``"logged"``: a log within an epoch."""
        if training.world.is_first:
            self._folder.add_metrics(
                {"epoch": training.epoch, "step": training.step, **training.metrics}
            )
        self._write(training)
        self._tell("logged", training)

    def on_epoch(self, training: TrainingContext) -> None:
        """Told as ``"epoch"``."""
        self._tell("epoch", training)

    def on_evaluated(self, training: TrainingContext) -> None:
        """Told as ``"evaluated"``."""
        self._write(training)
        self._tell("evaluated", training)

    def on_saved(self, training: TrainingContext) -> None:
        """Told as ``"saved"``."""
        self._tell("saved", training)

    def on_finish(self, training: TrainingContext) -> None:
        """Told as ``"finished"``."""
        self._tell("finished", training)

    def _write(self, training: TrainingContext) -> None:
        for name, value in training.metrics.items() if self._writer is not None else ():
            self._writer.add_scalar(name, value, training.step)

    def _tell(self, kind: Any, training: TrainingContext) -> None:
        if not training.world.is_first:
            return
        event = Event(
            kind, training.epoch, training.step, dict(training.metrics), str(training.folder)
        )
        training.world.tell(event)
        if not self._functions:
            return
        answers = [function(event) for function in self._functions]
        for answer in answers:
            if answer not in (None, "stop"):
                raise JobError(
                    f'on_event: a function answered {answer!r}; None or "stop" is expected'
                )
        if "stop" in answers:
            training.stop()

    def state_dict(self) -> dict[str, Any]:
        """Those of the functions that have one, in their order."""
        states = [
            function.state_dict() if has_state(function) else None for function in self._functions
        ]
        return {"functions": states} if any(state is not None for state in states) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the functions theirs."""
        for function, kept in zip(self._functions, state["functions"], strict=False):
            if kept is not None and has_state(function):
                function.load_state_dict(kept)

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
