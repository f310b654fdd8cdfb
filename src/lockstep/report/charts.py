"""Charts as data: what is shown, its ``numbers`` as a table, what is ``told`` in its place, its
drawing at any width.

Bars lie, with their names to the left: names are long, and a telephone is narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lockstep.report.canvas import COLOURS, FAINT, GRID, INK, new_figure, plain_axes, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

_NARROW = 5.0
"""Inches below which a drawing is for a telephone."""

Cell = str | float | int | None

Numbers = tuple[Sequence[str], Sequence[Sequence[Cell]]]
"""What a chart shows, as a table: a head, and rows."""

_SPREAD: dict[str, Any] = {"ecolor": INK, "elinewidth": 1.2, "capsize": 3, "zorder": 3}


@dataclass(frozen=True)
class Bars:
    """A bar for each name, with its spread; from the top."""

    unit: str  # of the values: ``samples per second``
    names: Sequence[str]
    values: Sequence[float]
    spreads: Sequence[tuple[float, float]] | None = None  # from where to where each value goes
    kinds: Sequence[str] | None = None  # by which they are coloured; None colours all alike
    notes: Sequence[str] | None = None  # a few words behind each bar, beside its value

    def numbers(self) -> Numbers:
        """Name, value, lowest, highest, note."""
        columns: list[Sequence[Cell]] = [self.names, self.values]
        head = ["", self.unit]
        if self.spreads is not None:
            columns += [[low for low, _ in self.spreads], [high for _, high in self.spreads]]
            head += ["lowest", "highest"]
        if self.notes is not None:
            columns.append(self.notes)
            head.append("note")
        return head, list(zip(*columns, strict=True))

    def told(self) -> str:
        """``Bars of samples per second: single 4,000; ddp 7,400.``"""
        shown = "; ".join(
            f"{name} {short(value)}" for name, value in zip(self.names, self.values, strict=True)
        )
        return f"Bars, {self.unit}: {shown}."

    def draw(self, width: float) -> Figure:
        """Lying bars."""
        figure = new_figure(width, 0.75 + 0.34 * len(self.names), self.unit)
        axes = plain_axes(figure)
        kinds = list(dict.fromkeys(self.kinds or ()))
        colours = (
            [COLOURS[kinds.index(k) % len(COLOURS)] for k in self.kinds]
            if self.kinds
            else COLOURS[0]
        )
        errors = None if self.spreads is None else _errors(self.values, self.spreads)
        bars = axes.barh(
            range(len(self.names)),
            self.values,
            xerr=errors,
            error_kw=_SPREAD,
            height=0.68,
            color=colours,
        )
        notes = [f"  {note}" if note else "" for note in self.notes or [""] * len(self.names)]
        _mark(
            axes,
            bars,
            [f"{short(value)}{note}" for value, note in zip(self.values, notes, strict=True)],
        )
        ends = [*self.values, *(high for _, high in self.spreads or ())]
        room = 1.3 if width >= _NARROW else 1.75
        _finish(
            axes,
            self.names,
            self.unit,
            max(ends, default=0.0) * (room if self.notes else room - 0.12),
            width,
        )
        return figure


@dataclass(frozen=True)
class Stacks:
    """A bar for each name, made of parts; from the top."""

    unit: str  # of the values
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]  # by name, its length in each bar

    def numbers(self) -> Numbers:
        """Name, then each part."""
        head = ["", *(f"{name}, {self.unit}" for name in self.parts)]
        return head, list(zip(self.names, *self.parts.values(), strict=True))

    def told(self) -> str:
        """Each bar with its parts."""
        bars = []
        for i, name in enumerate(self.names):
            inside = ", ".join(f"{part} {short(values[i])}" for part, values in self.parts.items())
            bars.append(f"{name}: {inside}")
        return f"Bars made of parts, {self.unit}. {'; '.join(bars)}."

    def draw(self, width: float) -> Figure:
        """Lying bars, their parts in a row."""
        rows = 1 if width >= _NARROW else 2
        figure = new_figure(width, 0.95 + 0.24 * rows + 0.34 * len(self.names), self.unit)
        axes = plain_axes(figure)
        begins = [0.0] * len(self.names)
        for colour, (part, values) in zip(COLOURS, self.parts.items(), strict=False):
            lengths = [max(0.0, value) for value in values]
            bars = axes.barh(
                range(len(self.names)),
                lengths,
                left=begins,
                height=0.68,
                color=colour,
                label=words(part),
                edgecolor="white",
                linewidth=0.5,
            )
            begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        _mark(axes, bars, list(map(short, begins)))
        _finish(axes, self.names, self.unit, max(begins, default=0.0) * 1.14, width)
        columns = len(self.parts) if rows == 1 else math.ceil(len(self.parts) / rows)
        figure.legend(
            loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, handlelength=1.1
        )
        return figure


@dataclass(frozen=True)
class Lines:
    """Lines over one axis."""

    x: str  # what the axis is: ``epoch``
    y: str  # what is shown: ``loss``
    series: Mapping[str, Sequence[tuple[float, float]]]  # by name, the points (x, y)
    # By name, from where to where the y of each point goes; those that have any.
    spreads: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(
        default_factory=dict
    )  # by name, what the lines are held against: a y
    # The axis is one of values that were chosen, and they are marked: "doubling" where they are
    # factors apart (1, 2, 4, 8), each then as far from the next; "even" where they are steps apart
    # (32, 48, 64).
    chosen: Literal["", "doubling", "even"] = ""

    def numbers(self) -> Numbers:
        """A row for each x, a column for each line, and its lowest and highest where it has
        them.
        """
        columns: dict[str, dict[float, float]] = {}
        for name, points in self.series.items():
            columns[name] = dict(points)
            if name in self.spreads:
                ends = [
                    (x, low, high)
                    for (x, _), (low, high) in zip(points, self.spreads[name], strict=True)
                ]
                columns[f"{name}, lowest"] = {x: low for x, low, _ in ends}
                columns[f"{name}, highest"] = {x: high for x, _, high in ends}
        columns |= {name: dict.fromkeys(self._places, level) for name, level in self.levels.items()}
        return [self.x, *columns], [
            (x, *(column.get(x) for column in columns.values())) for x in self._places
        ]

    @property
    def _places(self) -> list[float]:
        return sorted({x for points in self.series.values() for x, _ in points})

    def told(self) -> str:
        """Where each line begins and ends."""
        ends = [
            f"{name} from {short(points[0][1])} to {short(points[-1][1])}"
            for name, points in self.series.items()
            if points
        ]
        ends += [f"{name} at {short(level)}" for name, level in self.levels.items()]
        return f"Lines of {self.y} over {self.x}: {'; '.join(ends)}."

    def draw(self, width: float) -> Figure:
        """Lines with marks; those that lie on one another show through by their dashes."""
        narrow = width < _NARROW
        columns = 2 if narrow else 4
        names = len(self.series) + len(self.levels)
        legend = 0.2 * math.ceil(names / columns)
        figure = new_figure(width, (2.6 if narrow else 3.2) + legend, self.y)
        axes = plain_axes(figure)
        dashes = ("-", (0, (6, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)))
        for i, (name, points) in enumerate(self.series.items()):
            # Where there are several the first are the widest, so that they show beneath the
            # others.
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=COLOURS[i % len(COLOURS)],
                label=words(name),
                linewidth=1.8 if len(self.series) < 3 else max(1.4, 4.2 - 0.7 * i),
                linestyle=dashes[i % len(dashes)],
                marker="o",
                markersize=3.5,
            )
            if name in self.spreads:
                xs, ys = zip(*points, strict=True)
                axes.errorbar(xs, ys, yerr=_errors(ys, self.spreads[name]), fmt="none", **_SPREAD)
        for i, (name, level) in enumerate(self.levels.items()):
            colour = COLOURS[(len(self.series) + i) % len(COLOURS)]
            axes.axhline(
                level, color=colour, label=words(name), linewidth=1.4, linestyle=dashes[1 + i % 3]
            )
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_xlabel(words(self.x), fontsize=9, color=FAINT)
        axes.set_ylabel(words(self.y), fontsize=9, color=FAINT)
        if self.chosen:
            if self.chosen == "doubling":
                axes.set_xscale("log", base=2)
            axes.set_xticks(self._places, [short(x) for x in self._places])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
        elif all(float(x).is_integer() for x in self._places):
            axes.locator_params(axis="x", integer=True)
        if names > 1:
            figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5)
        return figure


def _errors(values: Sequence[float], spreads: Sequence[tuple[float, float]]) -> list[list[float]]:
    """How far each spread goes below its value, and how far above."""
    pairs = list(zip(values, spreads, strict=True))
    return [
        [max(0.0, v - low) for v, (low, _) in pairs],
        [max(0.0, high - v) for v, (_, high) in pairs],
    ]


def _mark(axes: Axes, bars: BarContainer, texts: Sequence[str]) -> None:
    """A text behind the end of each bar."""
    axes.bar_label(bars, list(map(words, texts)), padding=5, fontsize=8.5)


def _finish(axes: Axes, names: Sequence[str], unit: str, end: float, width: float) -> None:
    """Names to the left of lying bars, and the axis of their values."""
    axes.set_yticks(
        range(len(names)), [words(_folded(name, 16 if width < _NARROW else 34)) for name in names]
    )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, end or 1.0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(words(unit), fontsize=9, color=FAINT)
    if width < _NARROW:
        axes.locator_params(axis="x", nbins=4)


def _folded(name: str, length: int) -> str:
    """A long name in two lines."""
    if len(name) <= length or " " not in name:
        return name
    middle = min(
        (i for i, letter in enumerate(name) if letter == " "), key=lambda i: abs(i - len(name) // 2)
    )
    return f"{name[:middle]}\n{name[middle + 1 :]}"


def short(value: float) -> str:
    """``12,340``, ``1.23``: four digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
