"""What a training tells while it runs: to the person's own ``on_event`` functions, and to the display."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """Something that happened in a training, told on rank 0.

    Attributes:
        kind: ``"started"``, ``"epoch"`` (its training is done), ``"evaluated"``, ``"saved"`` or ``"finished"``.
        epoch: the epoch, from 1 (0 at the start).
        step: updates so far.
        metrics: what is known of the epoch: ``train_loss``, ``eval_loss``, each metric, ``lr``, ``samples_per_second``.
        folder: the run's folder.
    """

    kind: Literal["started", "epoch", "evaluated", "saved", "finished"]
    epoch: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    folder: str | None = None


@dataclass(frozen=True)
class Line:
    """A line for the person to read."""

    text: str
    kind: Literal["plain", "note"] = "plain"


@dataclass(frozen=True)
class Progress:
    """Where the training is, for a live display."""

    epoch: int
    epochs: int | None
    step: int
    steps: int | None
    loss: float
    samples_per_second: float
    seconds_left: float | None = None
    memory: tuple[tuple[str, int], ...] = ()
