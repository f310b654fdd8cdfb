"""The table of a profile, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from lockstep.profiling.time_breakdown import KINDS
from lockstep.report.charts import short
from lockstep.report.table import Table

_ROWS = 16
"""Rows of the table, so that it stays on one screen; the file has all."""

_WIDTH = 80
"""Columns of a terminal."""


def lines_of(summary: Mapping[str, Any], whose: str, folder: str) -> list[str]:
    """Return a table with a row for each rank, and what should be known to read it.

    Args:
        summary: what ``summary.json`` holds.
        whose: ``rank``, ``replica`` or ``device``.
        folder: of the traces.
    """
    every = summary[f"{whose}s"]
    steps = f"steps {summary['first_step']} to {summary['last_step']}"
    lines = [f"profile of {steps}, in ms per step and % of it:"]
    rows = []
    for number, row in enumerate(every[:_ROWS]):
        cells = [f"{number} {row['device']}"]
        for kind in KINDS:
            cells.append(f"{_milliseconds(row['seconds'][kind])} {row['shares'][kind]:>4.0%}")
        rows.append([*cells, _milliseconds(row["step_seconds"])])
    lines += Table([whose, *KINDS, "step"], rows).lines(_WIDTH)
    if len(every) > _ROWS:
        lines.append(f"and {len(every) - _ROWS} more, in summary.json")

    for note in (*summary["notes"], f"traces for ui.perfetto.dev: {folder}/rank*.json.gz"):
        lines += textwrap.wrap(note, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines


def _milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, to the microsecond; one that rounding took below 0 is 0."""
    milliseconds = max(0.0, 1e3 * seconds)
    return short(round(milliseconds, 3))
