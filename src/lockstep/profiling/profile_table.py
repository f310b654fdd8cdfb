"""The table of a profile, for a terminal."""

from __future__ import annotations

import textwrap

from lockstep.profiling.time_breakdown import KINDS
from lockstep.report.charts import short
from lockstep.report.table import Table
from lockstep.run.events import Profile, TimesOf

_ROWS = 16
"""Rows of the table, so that it stays on one screen; the file has all."""


def lines_of(profile: Profile, width: int = 80) -> list[str]:
    """Return a table with a row for each rank, and what should be known to read it.

    The table takes about 75 columns.

    Args:
        profile: what was found.
        width: of the terminal, in columns.
    """
    steps = f"step {profile.first}"
    if profile.last > profile.first:
        steps = f"steps {profile.first} to {profile.last}"
    lines = _wrapped(f"profile of {steps}, in ms per step and % of it:", width)

    head = [profile.whose, *KINDS, "step"]
    rows = [_cells(row) for row in profile.rows[:_ROWS]]
    table = Table(head, rows)
    lines += table.lines(width)
    more = len(profile.rows) - _ROWS
    if more > 0:
        lines.append(f"and {more} more, in summary.json")

    for note in profile.notes:
        lines += _wrapped(note, width)
    traces = ", ".join(profile.traces[:2])
    if len(profile.traces) > 2:
        traces += ", ..."
    lines += _wrapped(f"traces for ui.perfetto.dev: {traces} in {profile.folder}", width)
    return lines


def _cells(row: TimesOf) -> list[str]:
    """Return the cells of a rank or replica."""
    cells = [f"{row.number} {row.device}"]
    for kind in KINDS:
        seconds = row.kinds[kind]
        cells.append(f"{_milliseconds(seconds)} {seconds / row.step:>4.0%}")
    cells.append(_milliseconds(row.step))
    return cells


def _milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, to the microsecond; one that rounding took below 0 is 0."""
    milliseconds = max(0.0, 1e3 * seconds)
    return short(round(milliseconds, 3))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False)
