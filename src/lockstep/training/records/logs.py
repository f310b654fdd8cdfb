"""What is reported within an epoch: a record, a line and an event for each log, and the pace for the
display.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from lockstep.data import Batch
from lockstep.launch.memory import memory_now
from lockstep.model.losses.loss import Loss
from lockstep.run.events import Line, Progress
from lockstep.run.terminal import duration, named_number
from lockstep.strategies.steps.update_result import Sums, added
from lockstep.training.progress import TrainingProgress
from lockstep.training.setup import Setup


class Logs:
    """Counts the updates of this process, logs them, and shows where the training is.

    Only rank 0 logs, from what it has read of the updates anyway. Where the ranks don't meet in an
    update, the loss is that of rank 0's local batches.

    Args:
        setup: what is trained.
        progress: holds the loss since the last log, perhaps that of an earlier process.
    """

    def __init__(self, setup: Setup, progress: TrainingProgress) -> None:
        world = setup.world
        self._world = world
        self._step = setup.step
        self._steps = setup.steps  # at which the training ends, if that is known
        self._progress = progress
        self._samples = 0  # since the last log
        self._first_step = world.step
        self._began = self._now()
        self._last_log = self._began
        self._last_shown = self._began
        # Reading a loss waits for an accelerator.
        self._interval = 0.2 if world.device.is_slot else 1.0

    def _now(self) -> float:
        """Return the seconds on a clock that stands still where nothing is trained."""
        return time.perf_counter() - self._progress.paused

    def add(self, loss: Loss) -> None:
        """Add what was read of an update."""
        self._progress.recent = added([self._progress.recent, loss])

    def note(self, batch: Batch, sums: Sums) -> None:
        """Count an update, and show the pace unless that was done a moment ago.

        Args:
            batch: of the update.
            sums: the loss of the epoch so far.
        """
        self._samples += batch.size
        now = self._now()
        world = self._world
        if not world.is_first or now - self._last_shown < self._interval:
            return

        self._last_shown = now
        world.emit(
            Progress(
                epoch=self._progress.number,
                epochs=self._progress.last_epoch,
                step=world.step,
                steps=self._steps,
                loss=sums.read().means("")["loss"],
                samples_per_second=self._samples / (now - self._last_log),
                seconds_left=self._seconds_left(now),
                memory=memory_now(world),
            )
        )

    def log(self) -> dict[str, float]:
        """Log the updates since the last log, and return the values by name."""
        now = self._now()
        values = self._progress.recent.means("")
        values["lr"] = float(self._step.optimizer.param_groups[0].get("lr", math.nan))
        if self._step.grad_norm is not None:
            values["grad_norm"] = float(self._step.grad_norm)
        values["samples_per_second"] = self._samples / (now - self._last_log)

        self._progress.recent = Loss(0.0, 0.0)
        self._samples = 0
        self._last_log = now
        self._world.emit(Line(self._line(values, now)))
        return values

    def _line(self, values: Mapping[str, float], now: float) -> str:
        """Return ``step 300/5,000  loss 0.1234  lr 0.001  8,000 samples/s  3:20 left``."""
        step = self._world.step
        words = [f"step {step:,}/{self._steps:,}" if self._steps else f"step {step:,}"]
        for name, value in values.items():
            if name == "samples_per_second":
                words.append(f"{value:,.0f} samples/s")
            else:
                words.append(named_number(name, value))

        left = self._seconds_left(now)
        if left is not None:
            words.append(f"{duration(left)} left")
        return "  ".join(words)

    def _seconds_left(self, now: float) -> float | None:
        """Return how long the updates to come will take; None where their number isn't known."""
        if self._steps is None:
            return None
        step = self._world.step
        return (self._steps - step) * (now - self._began) / (step - self._first_step)
