"""Charts as data: what a chart shows, its ``numbers`` as a table, a text in its place, its drawing.

A chart is drawn once, at a width that can be read on a telephone; an SVG scales to a desk. Bars lie,
with their names to the left, because names are long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

Cell = str | float | int | None

Numbers = tuple[Sequence[str], Sequence[Sequence[Cell]]]
"""What a chart shows, as a table: a head, and rows."""

_SPREAD: dict[str, Any] = {"ecolor": INK, "elinewidth": 1.2, "capsize": 3, "zorder": 3}

_LINE = 0.36
"""Inches of height for each bar."""

_NAME = 22
"""Letters of a name in one line; a longer one takes two."""

_DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)))


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
    spreads: Sequence[tuple[float, float]] | None = None
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

    def told(self) -> str:
        """Return ``Bars, samples per second: single 4,000; ddp 7,400.``"""
        shown = []
        for name, value in zip(self.names, self.values, strict=True):
            shown.append(f"{name} {short(value)}")
        return f"Bars, {self.unit}: {'; '.join(shown)}."

    def draw(self) -> Figure:
        """Draw lying bars."""
        figure = new_figure(WIDTH, 0.8 + _LINE * len(self.names), self.unit)
        axes = plain_axes(figure)
        kinds = self.kinds or [""] * len(self.names)
        order = list(dict.fromkeys(kinds))
        colours = [_colour(order.index(kind)) for kind in kinds]
        longest = max(self.values, default=0.0)
        errors = None
        if self.spreads is not None:
            errors = _errors(self.values, self.spreads)
            longest = max(longest, *(highest for _, highest in self.spreads))
        bars = axes.barh(
            range(len(self.names)),
            self.values,
            height=0.68,
            color=colours,
            xerr=errors,
            error_kw=_SPREAD,
        )

        marks = [short(value) for value in self.values]
        room = 1.25
        if self.notes is not None:
            marks = [f"{mark}  {note}" for mark, note in zip(marks, self.notes, strict=True)]
            room = 1.5
        _mark(axes, bars, marks)
        _finish(axes, self.names, self.unit, longest * room)
        return figure


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

    def told(self) -> str:
        """Return each bar with its parts."""
        bars = []
        for i, name in enumerate(self.names):
            inside = [f"{part} {short(values[i])}" for part, values in self.parts.items()]
            bars.append(f"{name}: {', '.join(inside)}")
        return f"Bars made of parts, {self.unit}. {'; '.join(bars)}."

    def draw(self) -> Figure:
        """Draw lying bars, their parts in a row."""
        figure = new_figure(WIDTH, 1.2 + _LINE * len(self.names), self.unit)
        axes = plain_axes(figure)
        begins = [0.0] * len(self.names)
        for number, (part, values) in enumerate(self.parts.items()):
            lengths = [max(0.0, value) for value in values]
            bars = axes.barh(
                range(len(self.names)),
                lengths,
                left=begins,
                height=0.68,
                color=_colour(number),
                label=words(part),
                edgecolor="white",
                linewidth=0.5,
            )
            begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        _mark(axes, bars, [short(whole) for whole in begins])
        _finish(axes, self.names, self.unit, max(begins, default=0.0) * 1.2)
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
    series: Mapping[str, Sequence[tuple[float, float]]]
    spreads: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    chosen: bool = False

    @property
    def _places(self) -> list[float]:
        places = {x for points in self.series.values() for x, _ in points}
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
            row = [column.get(x) for column in columns.values()]
            rows.append([x, *row])
        return [self.x, *columns], rows

    def told(self) -> str:
        """Return where each line begins and ends."""
        ends = []
        for name, points in self.series.items():
            if points:
                ends.append(f"{name} from {short(points[0][1])} to {short(points[-1][1])}")
        return f"Lines of {self.y} over {self.x}: {'; '.join(ends)}."

    def draw(self) -> Figure:
        """Draw lines with marks; those that lie on one another show through by their dashes."""
        rows = math.ceil(len(self.series) / 2)
        figure = new_figure(WIDTH, 3.0 + 0.22 * rows, self.y)
        axes = plain_axes(figure)
        for number, (name, points) in enumerate(self.series.items()):
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
                errors = _errors(ys, self.spreads[name])
                axes.errorbar(xs, ys, yerr=errors, fmt="none", **_SPREAD)

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


def _errors(
    values: Sequence[float], spreads: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return how far each spread goes below its value, and how far above."""
    below = []
    above = []
    for value, (lowest, highest) in zip(values, spreads, strict=True):
        below.append(max(0.0, value - lowest))
        above.append(max(0.0, highest - value))
    return below, above


def _legend(figure: Figure, columns: int) -> None:
    """Name the colours above the chart."""
    figure.legend(
        loc="outside upper left",
        ncols=min(columns, 3),
        frameon=False,
        fontsize=LETTERS,
        handlelength=1.5,
    )


def _mark(axes: Axes, bars: BarContainer, texts: Sequence[str]) -> None:
    """Write a text behind the end of each bar."""
    axes.bar_label(bars, [words(text) for text in texts], padding=5, fontsize=LETTERS)


def _finish(axes: Axes, names: Sequence[str], unit: str, end: float) -> None:
    """Write names to the left of lying bars, and the axis of their values."""
    labels = [words(_folded(name)) for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, end or 1.0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(words(unit), fontsize=LETTERS, color=FAINT)
    axes.locator_params(axis="x", nbins=5)


def _folded(name: str) -> str:
    """Return a long name in two lines."""
    if len(name) <= _NAME:
        return name
    spaces = [i for i, letter in enumerate(name) if letter == " "]
    if not spaces:
        return name
    middle = min(spaces, key=lambda i: abs(i - len(name) // 2))
    return f"{name[:middle]}\n{name[middle + 1 :]}"


def short(value: float) -> str:
    """Return ``12,340``, ``1.23``: four digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
