"""Where the time of a profiled step went: the notes of all ranks compared.

A rank that communicates either waits for the last rank to come, or takes part in the transfer. The
last one to come doesn't wait, so what the others take longer is waiting::

    rank 0   computing |  waiting   | communicating |
    rank 1   computing              | communicating |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class TimesOf:
    """The mean profiled step of one rank, or of one replica of ``dp``, in seconds.

    Attributes:
        number: of the rank or replica.
        device: where it computes.
        step: the whole step.
        kinds: computing, communicating, waiting, loading and other; they add up to the step.
        phases: the same time by what was done (``backward``, say), as far as that was noted.
    """

    number: int
    device: str
    step: float
    kinds: dict[str, float]
    phases: dict[str, float]


def times_of(tracks: Sequence[Track]) -> tuple[TimesOf, ...]:
    """Return the mean step of each track, its communicating divided in waiting and the rest.

    Args:
        tracks: those of all ranks (or replicas), in order, with equally many steps.
    """
    for together in zip(*(track.steps for track in tracks), strict=True):
        _divide(together)
    return tuple(_mean(track) for track in tracks)


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


def _mean(track: Track) -> TimesOf:
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
    return TimesOf(track.number, track.device, wall, kinds, phases)
