"""Callbacks that end a training early: where a metric no longer improves, or at a time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.errors import JobError, counted, nearest
from lockstep.settings import Every
from lockstep.training.callbacks.callback import Callback, TrainingContext
from lockstep.training.triggers import SharedClock


class EarlyStopping(Callback):
    """Ends the training when a metric has not improved for some evaluations. ``best.safetensors``
    has the best weights.

    Args:
        metric: a name in ``metrics.jsonl``: ``eval_loss``, ``train_loss``, one of the job's
            metrics.
        mode: ``"min"`` where less is better, else ``"max"``.
        patience: the number of evaluations that may be no better than the best one.
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
        if mode not in ("min", "max"):
            raise JobError(f'EarlyStopping: mode is "min" or "max", not {mode!r}')
        self._metric = metric
        self._sign = 1 if mode == "min" else -1
        self._patience = patience
        self._min_delta = min_delta
        self._best = math.inf
        self._since = 0

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Refuse a metric that is neither among those of an evaluation nor added by the training.

        Raises:
            JobError: there is no such metric.
        """
        name = self._metric
        if name in known or name.startswith("lr"):
            return
        if name.startswith("train_") and "train_loss" not in known:
            return  # it may come at the end of an epoch
        there = nearest(name, list(known)) if known else "the job has no evaluation"
        raise JobError(f'EarlyStopping: there is no metric "{name}": {there}')

    def on_evaluated(self, training: TrainingContext) -> None:
        """Compare with the best evaluation."""
        metrics = training.metrics
        if self._metric.startswith("train_") and "train_loss" not in metrics:
            return  # of an epoch, and this evaluation is within one
        self.refuse_unknown(metrics)
        value = self._sign * metrics.get(self._metric, math.nan)
        if value < self._best - self._min_delta:  # NaN is never better
            self._best = value
            self._since = 0
        else:
            self._since += 1

        if self._since >= self._patience:
            training.stop(
                f"{self._metric} has not improved for {counted(self._since, 'evaluation')}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and how many evaluations were no better since."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._best = state["best"]
        self._since = state["since"]


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
        self._seconds = seconds
        self._limit = limit
        self._clock: SharedClock

    def on_start(self, training: TrainingContext) -> None:
        """Begin to count the time."""
        world = training.world
        together = world.layout.together
        self._clock = SharedClock(world, {self._limit: self._seconds}, together=together)

    def on_step(self, training: TrainingContext) -> None:
        """End the training if the time is over."""
        if self._clock.over():
            self._stop(training)

    def on_saved(self, training: TrainingContext) -> None:
        """Look after an evaluation, which takes its time too."""
        if training.world.is_first and self._clock.left(self._limit) <= 0:
            self._stop(training)

    def _stop(self, training: TrainingContext) -> None:
        training.stop(f"the limit of {self._limit} is reached")
