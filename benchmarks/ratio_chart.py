"""Ratios as an SVG: a bar from 1 to the median, a line from the lowest to the highest, a mark at
the goal. The axis is logarithmic: 2 and 0.5 are as far from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, EDGE, TOP, STEP = 440, 12, 50, 40
"""Pixels: as wide as a phone shows nearly in full; above the rows; for a row."""

STYLE = """
  text {
    font: 13px system-ui, sans-serif; fill: #222;
    paint-order: stroke; stroke: #fff; stroke-width: 4px
  }
  .small { font-size: 11.5px; fill: #555 }
  .ground { fill: #fff }
  .grid { stroke: #ddd }
  .one { stroke: #888 }
  .met { fill: #4a7fc1 }
  .missed { fill: #d9772b }
  .spread, .goal { stroke: #222; stroke-width: 1.5 }
  .goal { stroke-width: 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd; stroke: #1e2129 }
    .small { fill: #aaa }
    .ground { fill: #1e2129 }
    .grid { stroke: #3a3e48 }
    .one { stroke: #999 }
    .spread, .goal { stroke: #eee }
  }
"""


@dataclass(frozen=True)
class Bar:
    """One ratio: what is compared, and its numbers."""

    label: str
    shown: str
    median: float
    spread: tuple[float, float]
    goal: float | None
    missed: bool


class Axis:
    """Where a ratio lies, in pixels from the left."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        values = [1.0, *(value for bar in bars for value in (bar.median, *bar.spread))]
        values += [bar.goal for bar in bars if bar.goal]
        self._low = math.log2(min(values)) - 0.1
        self._high = math.log2(max(values)) + 0.1

    def __call__(self, value: float) -> float:
        part = (math.log2(value) - self._low) / (self._high - self._low)
        return EDGE + part * (WIDTH - 2 * EDGE)

    def ticks(self) -> list[float]:
        """Powers of two; halves of an octave too where these are few."""
        ends = math.ceil(self._low), math.floor(self._high)
        powers = [2.0**power for power in range(ends[0], ends[1] + 1)]
        if len(powers) > 2:
            return powers
        return [tick for tick in (0.8, 0.9, 1, 1.2, 1.5, 2) if self._holds(tick)]

    def _holds(self, value: float) -> bool:
        return self._low <= math.log2(value) <= self._high


def chart(title: str, bars: Sequence[Bar]) -> str:
    """Draw the ratios below one another."""
    axis = Axis(bars)
    height = TOP + STEP * len(bars) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        *_legend(any(bar.goal for bar in bars), any(bar.missed for bar in bars)),
    ]
    for tick in axis.ticks():
        place = axis(tick)
        kind = "one" if tick == 1 else "grid"
        lines.append(_line(kind, place, TOP, place, height - 8))
        lines.append(
            f'<text class="small" x="{place:.1f}" y="{TOP - 5}" '
            f'text-anchor="middle">{tick:g}</text>'
        )
    for number, bar in enumerate(bars):
        lines += _row(bar, axis, TOP + STEP * number)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(goals: bool, missed: bool) -> list[str]:
    words = "bar: median · line: lowest to highest"
    if goals:
        words += " · thick mark: goal"
    if missed:
        words += " · orange: missed"
    return [f'<text class="small" x="{EDGE}" y="20">{words}</text>']


def _row(bar: Bar, axis: Axis, top: float) -> list[str]:
    start, end = sorted((axis(1.0), axis(bar.median)))
    middle = top + 29
    lines = [
        f'<text x="{EDGE}" y="{top + 17}">{escape(bar.label, quote=False)}</text>',
        f'<text x="{WIDTH - EDGE}" y="{top + 17}" text-anchor="end">{bar.shown}</text>',
        f'<rect class="{"missed" if bar.missed else "met"}" x="{start:.1f}" y="{middle - 5}" '
        f'width="{max(end - start, 1):.1f}" height="10"/>',
        _line("spread", axis(bar.spread[0]), middle, axis(bar.spread[1]), middle),
    ]
    if bar.goal is not None:
        lines.append(_line("goal", axis(bar.goal), middle - 7, axis(bar.goal), middle + 7))
    return lines


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"/>'
