"""Where the time of a profiled step went: the notes of all ranks compared.

A rank that communicates either waits for the last rank to come, or takes part in the transfer. The
last one to come doesn't wait, so what the others take longer is waiting::

    rank 0   computing |  waiting   | communicating |
    rank 1   computing              | communicating |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.observer import Kind

KINDS: tuple[Kind, ...] = ("computing", "communicating", "waiting", "loading", "other")


@dataclass
class StepTimes:
    """What one rank, or one replica, noted in one step. Times are in seconds.

    Attributes:
        wall: from asking for the batch until the loop asks for the next one.
        spent: by kind and phase, without the phases inside it.
    """

    wall: float = 0.0
    spent: dict[tuple[Kind, str], float] = field(default_factory=dict)

    def add(self, kind: Kind, phase: str, seconds: float) -> None:
        """Note some more time."""
        self.spent[kind, phase] = self.spent.get((kind, phase), 0.0) + seconds


@dataclass
class Track:
    """All steps of one rank, or of one replica.

    Attributes:
        number: of the rank or replica.
        device: where it computes.
        steps: what it noted, step by step.
    """

    number: int
    device: str
    steps: list[StepTimes] = field(default_factory=list)


def times_of(tracks: Sequence[Track], whose: str) -> list[dict[str, Any]]:
    """Return the mean step of each track, its communicating divided in waiting and the rest, as
    ``summary.json`` has it.

    ``seconds`` are by kind, and add up to the step; ``phases`` are the same time by what was done
    (``backward``, say), as far as that was noted.

    Args:
        tracks: those of all ranks (or replicas), in order, with equally many steps.
        whose: what has a track: a ``rank``, ``replica`` or ``device``.
    """
    for together in zip(*(track.steps for track in tracks), strict=True):
        _divide(together)
    return [{whose: track.number, **_mean(track)} for track in tracks]


def _divide(steps: Sequence[StepTimes]) -> None:
    """Let what communicating took longer than on the rank where it was shortest be waiting.

    Args:
        steps: the same step, as each rank noted it.
    """
    for key in {key for step in steps for key in step.spent if key[0] == "communicating"}:
        present = [step for step in steps if key in step.spent]
        least = min(step.spent[key] for step in present)
        for step in present:
            step.add("waiting", key[1], step.spent[key] - least)
            step.spent[key] = least


def _mean(track: Track) -> dict[str, Any]:
    """Return the mean step of a track."""
    count = len(track.steps)
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    phases: dict[str, float] = {}
    wall = 0.0
    for step in track.steps:
        wall += step.wall / count
        for (kind, phase), seconds in step.spent.items():
            kinds[kind] += seconds / count
            name = phase
            if kind == "waiting":
                name = f"{phase}: waiting"
            phases[name] = phases.get(name, 0.0) + seconds / count
    kinds["other"] += wall - sum(kinds.values())
    return {
        "device": track.device,
        "step_seconds": wall,
        "seconds": kinds,
        "shares": {kind: seconds / wall for kind, seconds in kinds.items()},
        "phases": phases,
    }
