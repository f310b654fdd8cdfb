"""Where the time of a profiled step went: the clocks of all ranks laid side by side, and the table
that a person reads.

A rank that is in a collective either waits for the last rank to come, or takes part in the
transfer::

    rank 0   computing |  waiting   | communicating |
    rank 1   computing              | communicating |
                       ^ enters     ^ the last one enters

With one clock for all (ranks of one machine, replicas of one process) the last entry is known.
Clocks of several machines differ; there the shortest stay of any rank counts as communicating, and
what others stayed longer as waiting.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.launch.events import Profile, TimesOf
from lockstep.launch.observer import Kind

KINDS: tuple[Kind, ...] = ("computing", "communicating", "waiting", "loading", "other")

Collective = tuple[str, int]
"""Its name, and how many ranks take part: the first so many."""

_ROWS = 16
"""Rows of the table, so that it stays on one screen; the file has all."""

_WIDE = 79
"""Columns that the table takes; in a narrower terminal each rank has lines of its own."""


@dataclass
class StepTimes:
    """What one rank, or one replica, noted in one step. Times are in seconds."""

    wall: float = 0.0  # from asking for the batch until the loop comes back to ask for the next
    spent: dict[tuple[Kind, str], float] = field(
        default_factory=dict
    )  # by kind and phase, without what is inside it
    # For each kind of collective the moments of entering and leaving, in the order of the calls.
    collectives: dict[Collective, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, kind: Kind, phase: str, seconds: float) -> None:
        """Note some more time."""
        self.spent[kind, phase] = self.spent.get((kind, phase), 0.0) + seconds


@dataclass
class Track:
    """All steps of one rank, or of one replica."""

    number: int
    device: str
    steps: list[StepTimes] = field(default_factory=list)


def times_of(tracks: Sequence[Track], *, one_clock: bool) -> tuple[TimesOf, ...]:
    """The mean step of each track, its collectives divided in waiting and communicating.

    The tracks are those of all ranks (or replicas), in order, with equally many steps. With
    ``one_clock``, moments of different tracks can be compared.
    """
    for together in zip(*(track.steps for track in tracks), strict=True):
        _divide(together, one_clock)
    return tuple(_mean(track) for track in tracks)


def _divide(steps: Sequence[StepTimes], one_clock: bool) -> None:
    """Turn the collectives of one step into time spent, on all ranks."""
    for name, parties in {key for step in steps for key in step.collectives}:
        present = steps[:parties]
        calls = [step.collectives.get((name, parties), []) for step in present]
        if (
            len({len(mine) for mine in calls}) > 1
        ):  # some didn't note theirs: who waited for whom isn't known
            for step, mine in zip(present, calls, strict=True):
                step.add("communicating", name, sum(left - entered for entered, left in mine))
            continue
        for together in zip(*calls, strict=True):
            last = max(entered for entered, _ in together)
            shortest = min(left - entered for entered, left in together)
            for step, (entered, left) in zip(present, together, strict=True):
                stay = left - entered
                waiting = min(max(last - entered, 0.0), stay) if one_clock else stay - shortest
                step.add("waiting", name, waiting)
                step.add("communicating", name, stay - waiting)


def _mean(track: Track) -> TimesOf:
    count = len(track.steps)
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    phases: dict[str, float] = {}
    wall = sum(step.wall for step in track.steps) / count
    for step in track.steps:
        for (kind, phase), seconds in step.spent.items():
            kinds[kind] += seconds / count
            name = f"{phase}: waiting" if kind == "waiting" else phase
            phases[name] = phases.get(name, 0.0) + seconds / count
    kinds["other"] += wall - sum(kinds.values())
    return TimesOf(track.number, track.device, wall, kinds, phases)


# ---- what a person reads -------------------------------------------------------------------------


def lines_of(profile: Profile, width: int = 80) -> list[str]:
    """A table with a row for each rank, or in a narrow terminal a few lines for each."""
    steps = (
        f"steps {profile.first} to {profile.last}"
        if profile.last > profile.first
        else f"step {profile.first}"
    )
    lines = _wrapped(f"profile of {steps}, in ms per step and % of it:", width)
    shown = profile.rows[:_ROWS]
    lines += _table(profile.whose, shown) if width >= _WIDE else _list(profile.whose, shown)
    if len(shown) < len(profile.rows):
        lines += _wrapped(f"and {len(profile.rows) - len(shown)} more, in summary.json", width)
    for note in profile.notes:
        lines += _wrapped(note, width)
    traces = ", ".join(profile.traces[:2]) + (", ..." if len(profile.traces) > 2 else "")
    return [*lines, *_wrapped(f"traces for ui.perfetto.dev: {traces} in {profile.folder}", width)]


def _table(whose: str, rows: Iterable[TimesOf]) -> list[str]:
    lines = [
        f"{whose:<10}" + "".join(f"{kind:>{_column(kind)}}" for kind in KINDS) + f"{'step':>7}"
    ]
    for row in rows:
        cells = "".join(
            f"{f'{milliseconds(row.kinds[kind])} {row.kinds[kind] / row.step:>4.0%}':>{_column(kind)}}"
            for kind in KINDS
        )
        lines.append(f"{f'{row.number} {row.device}':<10}{cells}{milliseconds(row.step):>7}")
    return lines


def _column(kind: Kind) -> int:
    return max(len(kind) + 1, 12)


def _list(whose: str, rows: Iterable[TimesOf]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(f"{whose} {row.number} {row.device}: {milliseconds(row.step)} ms")
        lines += [
            f"  {k:<13} {milliseconds(row.kinds[k]):>6} {row.kinds[k] / row.step:>4.0%}"
            for k in KINDS
        ]
    return lines


def milliseconds(seconds: float) -> str:
    """``0.123``, ``1.23``, ``12.3``, ``1234``: three places or the whole number, at most six
    characters or so.
    """
    value = max(seconds, 0.0) * 1e3
    for limit, places in ((0.9995, 3), (9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{places}f}"
    return f"{value:.0f}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False)
