"""Charts as data: what a chart shows, its ``numbers`` as a table, and its drawing.

A chart is drawn once, at a width that can be read on a telephone; an SVG scales to a desk. Bars lie,
with their names to the left, because names are long.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lockstep.report.canvas import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    LETTERS,
    WIDTH,
    new_figure,
    plain_axes,
    words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = str | float | int | None

Pairs = Sequence[tuple[float, float]]
"""Points (x, y) of a line, or the lowest and the highest value of each bar or point."""

Numbers = tuple[Sequence[str], Sequence[Sequence[Cell]]]
"""What a chart shows, as a table: a head, and rows."""

_LINE = 0.36
"""Inches of height for each bar."""

_THICK = 0.68
"""Height of a bar, as a part of that."""

_FINE = 1.2
"""Points of a line from the lowest to the highest value."""

_NAME = 22
"""Letters of a name in one line; a longer one takes several."""

_DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)))


class Chart(Protocol):
    """What a page shows: bars, lines or what another room draws."""

    def numbers(self) -> Numbers:
        """Return what it shows as a table."""

    def draw(self) -> Figure:
        """Draw it."""


@dataclass(frozen=True)
class Bars:
    """A bar for each name, with its spread; from the top.

    Attributes:
        unit: of the values, such as ``samples per second``.
        names: one for each bar.
        values: their lengths.
        spreads: the lowest and the highest of each value.
        kinds: bars of the same kind have the same colour; None colours all alike.
        notes: a few words behind the value of each bar.
    """

    unit: str
    names: Sequence[str]
    values: Sequence[float]
    spreads: Pairs | None = None
    kinds: Sequence[str] | None = None
    notes: Sequence[str] | None = None

    def numbers(self) -> Numbers:
        """Return name, value, lowest, highest, note."""
        head = ["", self.unit]
        columns: list[Sequence[Cell]] = [self.names, self.values]
        if self.spreads is not None:
            head += ["lowest", "highest"]
            columns.append([lowest for lowest, _ in self.spreads])
            columns.append([highest for _, highest in self.spreads])
        if self.notes is not None:
            head.append("note")
            columns.append(self.notes)
        rows = list(zip(*columns, strict=True))
        return head, rows

    def draw(self) -> Figure:
        """Draw lying bars."""
        figure, axes = _lying(self.names, self.unit)
        places = range(len(self.names))
        axes.barh(places, self.values, height=_THICK, color=self._colours())
        ends = self.values
        if self.spreads is not None:
            lowest, ends = zip(*self.spreads, strict=True)
            axes.hlines(places, lowest, ends, color=INK, linewidth=_FINE)

        marks = [short(value) for value in self.values]
        if self.notes is not None:
            for number, note in enumerate(self.notes):
                marks[number] += f"  {note}"
        _mark(axes, ends, marks)
        return figure

    def _colours(self) -> list[str]:
        """Return the colour of each bar."""
        if self.kinds is None:
            return [_colour(0)] * len(self.names)
        colours: dict[str, str] = {}
        for kind in self.kinds:
            colours.setdefault(kind, _colour(len(colours)))
        return [colours[kind] for kind in self.kinds]


@dataclass(frozen=True)
class Stacks:
    """A bar for each name, made of parts; from the top.

    Attributes:
        unit: of the values.
        names: one for each bar.
        parts: by its name, the length of a part in each bar.
    """

    unit: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]

    def numbers(self) -> Numbers:
        """Return name, then each part."""
        head = [f"{name}, {self.unit}" for name in self.parts]
        rows = list(zip(self.names, *self.parts.values(), strict=True))
        return ["", *head], rows

    def draw(self) -> Figure:
        """Draw lying bars, their parts in a row."""
        figure, axes = _lying(self.names, self.unit)
        places = range(len(self.names))
        ends = [0.0] * len(places)
        for number, (part, values) in enumerate(self.parts.items()):
            lengths = [max(0.0, value) for value in values]
            axes.barh(
                places,
                lengths,
                left=ends,
                height=_THICK,
                color=_colour(number),
                label=words(part),
            )
            for place, length in enumerate(lengths):
                ends[place] += length
        _mark(axes, ends, [short(end) for end in ends])
        _legend(figure, len(self.parts))
        return figure


@dataclass(frozen=True)
class Lines:
    """Lines over one axis.

    Attributes:
        x: what the axis is, such as ``epoch``.
        y: what is shown, such as ``loss``.
        series: by name, the points (x, y).
        spreads: by name, the lowest and the highest y of each point, for lines that have them.
        chosen: whether a person chose the values of the axis. They are marked then, and values that
            are factors apart (1, 2, 4, 8) are equally far from one another.
    """

    x: str
    y: str
    series: Mapping[str, Pairs]
    spreads: Mapping[str, Pairs] = field(default_factory=dict)
    chosen: bool = False

    @property
    def _places(self) -> list[float]:
        """The values of the axis at which some line has a point, in order."""
        places: set[float] = set()
        for points in self.series.values():
            places.update(x for x, _ in points)
        return sorted(places)

    def numbers(self) -> Numbers:
        """Return a row for each x, and a column for each line, its lowest and its highest."""
        columns: dict[str, dict[float, float]] = {}
        for name, points in self.series.items():
            columns[name] = dict(points)
            lowest: dict[float, float] = {}
            highest: dict[float, float] = {}
            for (x, _), spread in zip(points, self.spreads.get(name, ()), strict=False):
                lowest[x], highest[x] = spread
            if lowest:
                columns[f"{name}, lowest"] = lowest
                columns[f"{name}, highest"] = highest

        rows = []
        for x in self._places:
            row: list[Cell] = [x]
            for column in columns.values():
                row.append(column.get(x))
            rows.append(row)
        return [self.x, *columns], rows

    def draw(self) -> Figure:
        """Draw lines with marks; those that lie on one another show through by their dashes."""
        rows = math.ceil(len(self.series) / 2)
        figure = new_figure(WIDTH, 3.0 + 0.22 * rows, self.y)
        axes = plain_axes(figure)
        for number, name in enumerate(self.series):
            self._draw_line(axes, number, name)

        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_xlabel(words(self.x), fontsize=LETTERS, color=FAINT)
        axes.set_ylabel(words(self.y), fontsize=LETTERS, color=FAINT)
        if self.chosen:
            self._mark_places(axes)
        elif all(float(x).is_integer() for x in self._places):
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        _widen(axes)
        if len(self.series) > 1:
            _legend(figure, 2)
        return figure

    def _draw_line(self, axes: Axes, number: int, name: str) -> None:
        """Draw a line, and its spreads.

        Args:
            axes: of the chart.
            number: of the line, from 0; its colour, width and dashes follow it.
            name: of the line.
        """
        points = self.series[name]
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        axes.plot(
            xs,
            ys,
            color=_colour(number),
            label=words(name),
            # The first ones are the widest, so that they show beneath the others.
            linewidth=max(1.4, 3.0 - 0.5 * number),
            linestyle=_DASHES[number % len(_DASHES)],
            marker="o",
            markersize=3.5,
        )
        if name in self.spreads:
            lowest, highest = zip(*self.spreads[name], strict=True)
            axes.vlines(xs, lowest, highest, color=INK, linewidth=_FINE)

    def _mark_places(self, axes: Axes) -> None:
        """Mark the values that were chosen."""
        places = self._places
        if places[0] > 0 and places[-1] >= 4 * places[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [short(x) for x in places])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)


def _widen(axes: Axes) -> None:
    """Show at least a thousandth of the values, so that lines that differ by rounding are one."""
    low, high = axes.get_ylim()
    least = 1e-3 * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim(low - least, high + least)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(figure: Figure, columns: int) -> None:
    """Name the colours above the chart.

    Args:
        figure: of the chart, whose lines or bars have labels.
        columns: how many names lie side by side, three at most.
    """
    figure.legend(
        loc="outside upper left",
        ncols=min(columns, 3),
        frameon=False,
        fontsize=LETTERS,
        handlelength=1.5,
    )


def _lying(names: Sequence[str], unit: str) -> tuple[Figure, Axes]:
    """Return a figure for lying bars, with their names to the left.

    Args:
        names: of the bars, from the top.
        unit: of their lengths.
    """
    figure = new_figure(WIDTH, 1.0 + _LINE * len(names), unit)
    axes = plain_axes(figure)
    labels = []
    for name in names:
        lines = textwrap.wrap(name, _NAME)
        labels.append(words("\n".join(lines)))
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(words(unit), fontsize=LETTERS, color=FAINT)
    return figure, axes


def _mark(axes: Axes, ends: Sequence[float], marks: Sequence[str]) -> None:
    """Write a text behind the end of each bar.

    Args:
        axes: of the bars.
        ends: of the bars, or of the lines on them.
        marks: the texts.
    """
    longest = max(ends, default=0.0) or 1.0
    letters = max(map(len, marks), default=0)
    axes.set_xlim(0, longest * (1 + 0.035 * letters))
    axes.locator_params(axis="x", nbins=5)
    for place, (end, mark) in enumerate(zip(ends, marks, strict=True)):
        axes.text(end + 0.015 * longest, place, words(mark), va="center", fontsize=LETTERS)


def short(value: float) -> str:
    """Return ``12,340``, ``1.23``: four digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 999.5:  # which rounds to four digits
        return f"{value:,.0f}"
    return f"{value:.3g}"
