"""What rank 0 reports within an epoch: a record, a line and an event for each log, and the pace for
the display.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from lockstep.data import Batch
from lockstep.job import Job
from lockstep.launch.memory import memory_now
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.run.events import Line, Memory, Progress
from lockstep.run.terminal import duration, named_number
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Sums, added
from lockstep.training.progress import TrainingProgress


class Logs:
    """Sums up the updates between two logs.

    Only rank 0 does so, from what it has read of them anyway.

    Where the ranks don't meet in an update, the loss is that of rank 0's local batches.

    Args:
        job: what is trained.
        step: its update.
        steps: the step at which the training ends; None where that isn't known.
        progress: holds the loss since the last log, perhaps that of an earlier process.
    """

    def __init__(
        self,
        job: Job,
        step: Step,
        steps: int | None,
        progress: TrainingProgress,
    ) -> None:
        self._step = step
        self._steps = steps
        self._progress = progress
        self._may_be_tokens = getattr(job.loss, "weight", None) is None
        self._are_tokens: bool | None = None
        self._earlier_count = float(progress.recent.count)  # counted by an earlier process
        self._samples = 0

        self._first = step.world.step
        self._began = time.perf_counter()
        self._last = self._began
        self._paused = 0.0

    def add(self, loss: Loss) -> None:
        """Add what was read of an update."""
        self._progress.recent = added([self._progress.recent, loss])

    def note(self, batch: Batch) -> None:
        """Count the samples of an update."""
        self._samples += batch.size
        if self._are_tokens is None:
            self._are_tokens = self._may_be_tokens and _are_tokens(batch)

    def log(self) -> dict[str, float]:
        """Log the updates since the last log, and return the values by name."""
        values = self._values(time.perf_counter())
        text = "  ".join(self._words(values))
        self._step.world.emit(Line(text))
        return values

    def _values(self, now: float) -> dict[str, float]:
        """Return what the updates since the last log came to, by name.

        Begin anew with the next ones.
        """
        progress = self._progress
        group = self._step.optimizer.param_groups[0]
        values = progress.recent.means("")
        values["lr"] = float(group.get("lr", math.nan))
        if self._step.grad_norm is not None:
            values["grad_norm"] = float(self._step.grad_norm)

        seconds = now - self._last - (progress.paused - self._paused)
        values["samples_per_second"] = self._samples / seconds
        tokens = float(progress.recent.count) - self._earlier_count
        if self._are_tokens and tokens > self._samples:
            values["tokens_per_second"] = tokens / seconds

        progress.recent = Loss(0.0, 0.0)
        self._earlier_count = 0.0
        self._samples = 0
        self._last = now
        self._paused = progress.paused
        return values

    def _words(self, values: Mapping[str, float]) -> list[str]:
        """Return ``step 300/5,000``, ``loss 0.1234``, ``lr 0.001``, ``8,000 samples/s``, ``3:20
        left``.
        """
        step = self._step.world.step
        words = [f"step {step:,}/{self._steps:,}" if self._steps else f"step {step:,}"]

        for name, value in values.items():
            if name.endswith("_per_second"):
                words.append(f"{value:,.0f} {name.removesuffix('_per_second')}/s")
            else:
                words.append(named_number(name, value))

        if self._steps is not None:
            seconds = (self._last - self._began) / (step - self._first)
            words.append(f"{duration((self._steps - step) * seconds)} left")

        return words


def _are_tokens(batch: Batch) -> bool:
    """Return whether rank 0's targets are integers of shape (batch, time)."""
    microbatches = batch.shares[0] if batch.shares else batch.parts
    targets = microbatches[0].targets
    if not isinstance(targets, torch.Tensor) or targets.dim() != 2:
        return False
    return not (targets.is_floating_point() or targets.is_complex())


class Pace:
    """Reports to the display where the training is, at most some times a second.

    Args:
        world: this rank's; ranks other than 0 report their memory only.
        epochs: the number of epochs to train, where that is known.
        steps: the step at which the training ends, where that is known.
    """

    def __init__(
        self,
        world: World,
        epochs: int | None,
        steps: int | None,
    ) -> None:
        self._world = world
        self._epochs = epochs
        self._steps = steps
        self._first_step = world.step
        self._began = time.perf_counter()
        self._last = self._began
        # Reading a loss waits for an accelerator.
        self._interval = 0.2 if world.is_first and world.device.is_slot else 1.0

    def show(
        self,
        epoch: int,
        samples: int,
        sums: Sums,
    ) -> None:
        """Report, unless that was done a moment ago.

        Args:
            epoch: its number, from 1.
            samples: since the pace began.
            sums: the loss of the epoch so far.
        """
        now = time.perf_counter()
        if now - self._last < self._interval:
            return
        self._last = now

        world = self._world
        if not world.is_first:
            world.emit(Memory(memory_now(world)))
            return

        elapsed = now - self._began
        seconds_left = None
        if self._steps is not None:
            seconds = elapsed / (world.step - self._first_step)
            seconds_left = (self._steps - world.step) * seconds

        world.emit(
            Progress(
                epoch=epoch,
                epochs=self._epochs,
                step=world.step,
                steps=self._steps,
                loss=sums.read().means("")["loss"],
                samples_per_second=samples / elapsed,
                seconds_left=seconds_left,
                memory=memory_now(world),
            )
        )
