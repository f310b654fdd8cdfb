"""Charts as data: what a chart shows, and its drawing.

A chart is drawn once, at a width that can be read on a telephone; an SVG scales to a desk. Bars lie,
with their names to the left, because names are long.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
FAINT = "#666666"
GRID = "#dddddd"

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f")
"""The colour-blind can tell these apart too (Okabe and Ito, 2008), as far as there are eight."""

WIDTH = 5.4
"""Inches of a chart on a page."""

LETTERS = 10
"""Points of the letters of a chart."""

DPI = 160

Pairs = Sequence[tuple[float, float]]
"""Points (x, y) of a line, or the lowest and the highest value of each bar or point."""

_LINE = 0.36
"""Inches of height for each bar."""

_THICK = 0.68
"""Height of a bar, as a part of that."""

_FINE = 1.2
"""Points of a line from the lowest to the highest value."""

_NAME = 22
"""Letters of a name in one line; a longer one takes several."""

_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Bars:
    """A bar for each name, with its spread; from the top.

    Attributes:
        unit: of the values, such as ``samples per second``.
        names: one for each bar.
        values: their lengths.
        spreads: the lowest and the highest of each value.
        notes: a few words behind the value of each bar.
    """

    unit: str
    names: Sequence[str]
    values: Sequence[float]
    spreads: Pairs
    notes: Sequence[str]

    def draw(self) -> Figure:
        """Draw lying bars, with their names to the left."""
        figure, axes = _new_figure(1.0 + _LINE * len(self.names))
        places = range(len(self.names))
        labels = [words("\n".join(textwrap.wrap(name, _NAME))) for name in self.names]
        axes.set_yticks(places, labels)
        axes.set_ylim(len(self.names) - 0.4, -0.6)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_xlabel(words(self.unit), fontsize=LETTERS, color=FAINT)
        axes.barh(places, self.values, height=_THICK, color=COLOURS[0])
        lowest, highest = zip(*self.spreads, strict=True)
        axes.hlines(places, lowest, highest, color=INK, linewidth=_FINE)

        # Room for the longest mark behind the longest bar.
        marks = [f"{short(self.values[i])}  {self.notes[i]}" for i in places]
        longest = max(highest)
        axes.set_xlim(0, longest * (1 + 0.035 * max(map(len, marks))))
        axes.locator_params(axis="x", nbins=5)
        for place, mark in zip(places, marks, strict=True):
            end = highest[place] + 0.015 * longest
            axes.text(end, place, words(mark), va="center", fontsize=LETTERS)
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

    def draw(self) -> Figure:
        """Draw lines with marks; those that lie on one another show through by their dashes."""
        rows = math.ceil(len(self.series) / 2)
        figure, axes = _new_figure(3.0 + 0.22 * rows)
        for number, name in enumerate(self.series):
            self._draw_line(axes, number, name)

        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_xlabel(words(self.x), fontsize=LETTERS, color=FAINT)
        axes.set_ylabel(words(self.y), fontsize=LETTERS, color=FAINT)
        if self.chosen:
            self._mark_places(axes)
        elif all(float(x).is_integer() for x in self._places):
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if len(self.series) > 1:
            figure.legend(
                loc="outside upper left",
                ncols=2,
                frameon=False,
                fontsize=LETTERS,
                handlelength=1.5,
            )
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
            color=COLOURS[number % len(COLOURS)],
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


def short(value: float) -> str:
    """Return ``12,340``, ``1.23``: four digits."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 999.5:  # which rounds to four digits
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure of that many inches, and its axes, without a frame and pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=LETTERS, labelcolor=INK)
    axes.set_axisbelow(True)
    return figure, axes


def words(text: str) -> str:
    """Return a text that matplotlib shows as it is: a dollar begins no formula."""
    return text.replace("$", r"\$")


def image(figure: Figure, format: str) -> bytes:
    """Return the figure as ``png`` or ``svg``."""
    out = io.BytesIO()
    figure.savefig(out, format=format, dpi=DPI)
    return out.getvalue()
