"""Logs within epochs: what the steps since the last one came to, as a record, a line and an
event of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.data import Batch
from lockstep.job import Job
from lockstep.launch.events import Line
from lockstep.launch.terminal import duration, number
from lockstep.model.losses.loss import Loss
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added


class Logs:
    """Sums up the steps between two logs; only rank 0 does so, from what it has read of them
    anyway.

    Where the ranks don't meet in an update, the loss is that of rank 0's local batches.

    Args:
        job: what is trained.
        step: its update.
        steps: all of them, where that is known.
        recent: the loss of the steps since the last log, of an earlier process.

    Attributes:
        recent: the loss of the steps since the last log.
    """

    def __init__(self, job: Job, step: Step, steps: int | None, recent: Loss) -> None:
        self._job, self._step, self._steps = job, step, steps
        self.recent = recent
        self._before = float(recent.count)  # what an earlier process has counted of it
        self._are_tokens: bool | None = None
        self._first = step.world.step
        self._samples = 0
        self._began = self._last = time.perf_counter()
        self._paused = 0.0

    def add(self, loss: Loss) -> None:
        """Add what was read of an update."""
        self.recent = added([self.recent, loss])

    def note(self, batch: Batch) -> None:
        """Count the samples of an update."""
        self._samples += batch.size
        if self._are_tokens is None:
            self._are_tokens = (
                _are_tokens(batch) and getattr(self._job.loss, "weight", None) is None
            )

    def log(self, paused: float) -> dict[str, float]:
        """Say what the steps since the last log came to, all of them read; gives that, by name.

        Args:
            paused: seconds of this process in which it evaluated.
        """
        values = self._taken(time.perf_counter(), paused)
        self._step.world.tell(Line("  ".join(self._words(values)), "log"))
        return values

    def _taken(self, now: float, paused: float) -> dict[str, float]:
        group = self._step.optimizer.param_groups[0]
        values = {**self.recent.means(""), "lr": float(group.get("lr", math.nan))}
        if self._step.grad_norm is not None:
            values["grad_norm"] = float(self._step.grad_norm)
        seconds = now - self._last - (paused - self._paused)
        values["samples_per_second"] = self._samples / seconds
        tokens = float(self.recent.count) - self._before
        if self._are_tokens and tokens > self._samples:
            values["tokens_per_second"] = tokens / seconds
        self.recent, self._before = Loss(0.0, 0.0), 0.0
        self._samples, self._last, self._paused = 0, now, paused
        return values

    def _words(self, values: Mapping[str, float]) -> Iterator[str]:
        """``step 300/5,000``, ``loss 0.1234``, ``lr 0.0010``, ``8,000 samples/s``, ``3:20
        left``.
        """
        step = self._step.world.step
        yield f"step {step:,}" + (f"/{self._steps:,}" if self._steps else "")
        for name, value in values.items():
            per_second = name.endswith("_per_second")
            yield (
                f"{value:,.0f} {name.partition('_')[0]}/s"
                if per_second
                else f"{name.replace('_', ' ')} {number(value)}"
            )
        if self._steps is not None:
            a_step = (self._last - self._began) / (step - self._first)
            yield f"{duration((self._steps - step) * a_step)} left"


def _are_tokens(batch: Batch) -> bool | None:
    """Whether targets are whole numbers of shape (batch, time); None where this process has none
    of them.
    """
    every: list[Any] = [
        part for parts in batch.shares or [batch.parts] for part in parts if part.size
    ]
    if not every:
        return None
    targets = every[0].targets
    whole = isinstance(targets, torch.Tensor) and not (
        targets.is_floating_point() or targets.is_complex()
    )
    return whole and targets.dim() == 2
