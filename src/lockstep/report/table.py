"""A table, for a page and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        head: the names of the columns.
        rows: the cells as they are shown; the first one of a row is its name.
        title: what it shows.
        caption: what should be known to read it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""

    def lines(self, width: int) -> list[str]:
        """Return the lines of a terminal of a width; a name without room has a line of its own."""
        every = [self.head, *self.rows]
        names, *columns = zip(*every, strict=True)
        widths = [max(map(len, column)) for column in columns]
        longest = max(map(len, names))
        between = 2
        if longest + sum(widths) + between * len(widths) > width:
            between = 1
        room = width - sum(widths) - between * len(widths)
        beside = min(longest, max(room, _LEAST))

        lines = []
        for name, *cells in every:
            if len(name) > beside:
                lines.append(name)
                name = ""
            line = name.ljust(beside)
            for cell, size in zip(cells, widths, strict=True):
                line += cell.rjust(size + between)
            lines.append(line.rstrip())
        return lines


_LEAST = 4
"""Columns for names in a narrow terminal."""
