"""What a training reports while it runs: to the person's own ``on_event`` functions, and to the
display.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """Something that happened in a training, reported on rank 0.

    Attributes:
        kind: ``"started"``, ``"logged"`` (by ``log_every``, within an epoch), ``"epoch"`` (its
            training is done), ``"evaluated"``, ``"saved"`` or ``"finished"``.
        epoch: the epoch, from 1 (0 at the start).
        step: updates so far.
        metrics: what is known of the epoch: ``train_loss``, ``eval_loss``, each metric, ``lr``,
            ``samples_per_second``; within it what was logged, or evaluated.
        folder: the run's folder.
    """

    kind: Literal["started", "logged", "epoch", "evaluated", "saved", "finished"]
    epoch: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    folder: str | None = None


@dataclass(frozen=True)
class Caveat:
    """Why results differ from single-device training, or may.

    Attributes:
        kind: one word or two, the same in each release: ``"batchnorm"``, ``"mixing"`` (the
            page on ``verify`` has the table).
        text: what it is, with what was detected.
        fix: the setting or the change that avoids it; "" where there is none.
    """

    kind: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}" if self.fix else self.text


@dataclass(frozen=True)
class Line:
    """A line for the person to read.

    Attributes:
        text: the line.
        kind: a note is of the numbers, or of what to look at; a plan, of what was chosen for this
            training.
        caveat: what a note is of, where it is of the results.
    """

    text: str
    kind: Literal["plain", "note", "plan"] = "plain"
    caveat: Caveat | None = None

    @classmethod
    def note(cls, what: Caveat | str) -> Line:
        """Return a note of a caveat, or of anything else."""
        return cls(str(what), "note", what if isinstance(what, Caveat) else None)

    @property
    def as_caveat(self) -> Caveat:
        """What a note is of; of kind ``"announced"`` where nothing but its text is known."""
        return self.caveat or Caveat("announced", self.text)


@dataclass(frozen=True)
class Progress:
    """Where rank 0 is, for a live display; ``loss`` is the mean of the epoch so far."""

    epoch: int
    epochs: int | None
    step: int
    steps: int | None
    loss: float
    samples_per_second: float
    seconds_left: float | None = None
    memory: tuple[tuple[str, int], ...] = ()
