"""Callbacks that end a training early: where a metric no longer improves, or at a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.errors import JobError, counted, nearest
from lockstep.job import Every
from lockstep.training.callbacks.callback import Callback, TrainingContext


class OfMetric(Callback):
    """A callback that goes by a metric, of which less or more is better; None is none."""

    def __init__(self, metric: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise JobError(f'{type(self).__name__}: mode is "min" or "max", not {mode!r}')
        self._metric, self._mode = metric, mode

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Refuse a metric that is not among those of an evaluation, and none that the training
        adds.

        Raises:
            JobError: it isn't.
        """
        name = self._metric
        may_come = ("lr",) if "train_loss" in known else ("lr", "train_")  # at the end of an epoch
        if name is not None and name not in known and not name.startswith(may_come):
            there = nearest(name, list(known)) if known else "the job has no evaluation"
            raise JobError(f'{type(self).__name__}: there is no metric "{name}": {there}')

    def measured(self, metrics: Mapping[str, float]) -> float:
        """The metric of an evaluation, with its sign changed where more is better; NaN is the
        worst.

        Raises:
            JobError: there is none of that name.
        """
        self.refuse_unknown(metrics)
        value = metrics.get(self._metric or "", math.nan)
        return math.inf if math.isnan(value) else value if self._mode == "min" else -value


class EarlyStopping(OfMetric):
    """Ends the training when a metric has not improved for some evaluations. ``best.safetensors``
    has the best weights.

    Args:
        metric: a name in ``metrics.jsonl``: ``eval_loss``, ``train_loss``, one of the job's
            metrics.
        mode: ``"min"`` where less is better, else ``"max"``.
        patience: so many evaluations may be no better than the best one.
        min_delta: what counts as better, at least.
    """

    def __init__(
        self,
        metric: str = "eval_loss",
        mode: Literal["min", "max"] = "min",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode)
        self._patience, self._least = patience, min_delta
        self._best, self._since = math.inf, 0

    def on_evaluated(self, training: TrainingContext) -> None:
        """Compare with the best one."""
        if str(self._metric).startswith("train_") and "train_loss" not in training.metrics:
            return  # of an epoch, and this evaluation is within one
        value = self.measured(training.metrics)
        is_better = value < self._best - self._least
        self._best, self._since = (value, 0) if is_better else (self._best, self._since + 1)
        if self._since >= self._patience:
            training.stop(
                f"{self._metric} has not improved for {counted(self._since, 'evaluation')}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value, and how many evaluations were no better since."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self._best, self._since = state["best"], state["since"]


class TimeLimit(Callback):
    """Ends the training after a time, by rank 0's clock, so that it is evaluated and saved in the
    time that is left.

    The time counts from the start of this process's training, a resumed one from its resuming.

    Args:
        limit: ``"90 s"``, ``"10 min"``, ``"2 h"``.
    """

    def __init__(self, limit: str) -> None:
        seconds = Every.read(limit, "TimeLimit").seconds
        if seconds is None:
            raise JobError(f"TimeLimit: {limit!r} is no time, as 10min")
        self._seconds, self._limit = seconds, limit
        self._began = 0.0
        self._first = self._look = 0

    def on_start(self, training: TrainingContext) -> None:
        """The time begins."""
        self._began = time.monotonic()
        self._first, self._look = training.step, training.step + 1

    def on_step(self, training: TrainingContext) -> None:
        """Look at rank 0's clock, at steps that it tells: the next in about half of the time
        that is left.
        """
        if training.step < self._look:
            return
        passed = time.monotonic() - self._began
        left, done = self._seconds - passed, training.step - self._first
        found = left <= 0, training.step + max(1, min(done, int(left / 2 * done / passed)))
        if (
            training.world.layout.together
        ):  # else each rank goes by its own, and the others come after
            found = training.world.broadcast_object(found)
        over, self._look = found
        if over:
            self._stop(training)

    def on_saved(self, training: TrainingContext) -> None:
        """Look after an evaluation, which takes its time too."""
        if training.world.is_first and time.monotonic() - self._began >= self._seconds:
            self._stop(training)

    def _stop(self, training: TrainingContext) -> None:
        training.stop(f"the limit of {self._limit} is reached")
