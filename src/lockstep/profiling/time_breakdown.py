"""Where the time of a profiled step went: the clocks of all ranks compared.

A rank that is in a collective either waits for the last rank to come, or takes part in the
transfer::

    rank 0   computing |  waiting   | communicating |
    rank 1   computing              | communicating |
                       ^ enters     ^ the last one enters

With one clock for all (ranks of one machine, replicas of one process) the last entry is known.
Clocks of several machines differ; there all of it counts as communicating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.launch.observer import Kind
from lockstep.run.events import TimesOf

KINDS: tuple[Kind, ...] = ("computing", "communicating", "waiting", "loading", "other")

Collective = tuple[str, int]
"""The name of a collective, and how many ranks take part: the first ones."""


@dataclass
class StepTimes:
    """What one rank, or one replica, noted in one step. Times are in seconds.

    Attributes:
        wall: from asking for the batch until the loop asks for the next one.
        spent: by kind and phase, without the phases inside it.
        collectives: when each was entered and left, in the order of the calls.
    """

    wall: float = 0.0
    spent: dict[tuple[Kind, str], float] = field(default_factory=dict)
    collectives: dict[Collective, list[tuple[float, float]]] = field(default_factory=dict)

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


def times_of(tracks: Sequence[Track], *, one_clock: bool) -> tuple[TimesOf, ...]:
    """Return the mean step of each track, its collectives divided in waiting and communicating.

    Args:
        tracks: those of all ranks (or replicas), in order, with equally many steps.
        one_clock: whether moments of different tracks can be compared.
    """
    for together in zip(*(track.steps for track in tracks), strict=True):
        _divide(together, one_clock)
    return tuple(_mean(track) for track in tracks)


def _divide(steps: Sequence[StepTimes], one_clock: bool) -> None:
    """Turn the collectives of one step into time spent, on all ranks.

    Args:
        steps: the same step, as each rank noted it.
        one_clock: whether moments of different ranks can be compared.
    """
    for name, parties in {key for step in steps for key in step.collectives}:
        present = steps[:parties]
        calls = [step.collectives.get((name, parties), []) for step in present]
        if not one_clock or len({len(mine) for mine in calls}) > 1:
            # Some ranks noted none, or moments can't be compared: who waited isn't known.
            for step, mine in zip(present, calls, strict=True):
                for entered, left in mine:
                    step.add("communicating", name, left - entered)
            continue
        for together in zip(*calls, strict=True):
            _divide_call(name, present, together)


def _divide_call(
    name: str,
    steps: Sequence[StepTimes],
    stays: Sequence[tuple[float, float]],
) -> None:
    """Divide one collective in waiting and communicating, on all ranks.

    Args:
        name: of the collective.
        steps: of the ranks that took part.
        stays: when each of them entered and left.
    """
    last = max(entered for entered, _ in stays)
    for step, (entered, left) in zip(steps, stays, strict=True):
        stay = left - entered
        waiting = min(max(last - entered, 0.0), stay)
        step.add("waiting", name, waiting)
        step.add("communicating", name, stay - waiting)


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
