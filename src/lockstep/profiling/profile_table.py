"""The table of a profile, for a terminal."""

from __future__ import annotations

import textwrap

from lockstep.launch.observer import Kind
from lockstep.profiling.time_breakdown import KINDS
from lockstep.run.events import Profile, TimesOf

_ROWS = 16
"""Rows of the table, so that it stays on one screen; the file has all."""


def lines_of(profile: Profile, width: int = 80) -> list[str]:
    """Return a table with a row for each rank, and what should be known to read it.

    The table takes 79 columns.
    """
    steps = f"step {profile.first}"
    if profile.last > profile.first:
        steps = f"steps {profile.first} to {profile.last}"
    lines = _wrapped(f"profile of {steps}, in ms per step and % of it:", width)

    heads = [f"{kind:>{_column(kind)}}" for kind in KINDS]
    lines.append(f"{profile.whose:<10}{''.join(heads)}{'step':>7}")
    lines += [_line(row) for row in profile.rows[:_ROWS]]
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


def _line(row: TimesOf) -> str:
    """Return the line of a rank or replica."""
    line = f"{f'{row.number} {row.device}':<10}"
    for kind in KINDS:
        seconds = row.kinds[kind]
        cell = f"{milliseconds(seconds)} {seconds / row.step:>4.0%}"
        line += f"{cell:>{_column(kind)}}"
    return f"{line}{milliseconds(row.step):>7}"


def _column(kind: Kind) -> int:
    """Return the width of a column."""
    return max(len(kind) + 1, 12)


def milliseconds(seconds: float) -> str:
    """Return ``0.123``, ``1.23``, ``12.3``, ``1234``: at most six characters or so."""
    value = max(seconds, 0.0) * 1e3
    if value < 0.9995:
        return f"{value:.3f}"
    if value < 9.995:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False)
