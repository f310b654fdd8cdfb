"""The canvas: figures of matplotlib, without its global state."""

from __future__ import annotations

import io
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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(figure: Figure) -> Axes:
    """Return axes without a frame."""
    axes: Axes = figure.add_subplot()
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=LETTERS, labelcolor=INK)
    axes.set_axisbelow(True)
    return axes


def words(text: str) -> str:
    """Return a text that matplotlib shows as it is: a dollar begins no formula."""
    return text.replace("$", r"\$")


def image(figure: Figure, format: str) -> bytes:
    """Return the figure as ``png`` or ``svg``."""
    out = io.BytesIO()
    figure.savefig(out, format=format, dpi=DPI)
    return out.getvalue()
