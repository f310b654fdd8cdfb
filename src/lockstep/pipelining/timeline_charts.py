"""Timelines of a pipeline, one above the other on one scale: which device works on which
micro-batch, and when.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.pipelining.timeline import Timeline
from lockstep.report.canvas import LETTERS, WIDTH, new_figure
from lockstep.report.charts import Cell, Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WAITING = "#eeeeee"


@dataclass(frozen=True)
class Timelines:
    """A chart of timelines, simulated or measured.

    Attributes:
        timelines: by title: ``{"ideal": ..., "measured": ...}``.
        unit: of the time axis.
    """

    timelines: Mapping[str, Timeline]
    unit: str = ""

    def numbers(self) -> Numbers:
        """Return a row for each action: title, device, stage, kind, micro-batch, start, end."""
        rows: list[list[Cell]] = []
        for title, timeline in self.timelines.items():
            for device, spans in enumerate(timeline.devices):
                for action, start, end in spans:
                    what = [action.stage, action.kind, action.microbatch]
                    rows.append([title, device, *what, start, end])
        return ["", "device", "stage", "kind", "micro-batch", "start", "end"], rows

    def draw(self, width: float = WIDTH) -> Figure:
        """Draw a row for each device: blue forwards, orange backwards, with the number of the
        micro-batch.
        """
        timelines = list(self.timelines.values())
        heights = [len(timeline.devices) + 1 for timeline in timelines]
        height = 1.0 + 0.42 * sum(heights) + 0.33 * len(heights)
        figure = new_figure(width, height, "a timeline")
        ratios = {"height_ratios": heights}
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=ratios)
        longest = max(timeline.makespan for timeline in timelines)

        for (title, timeline), axis in zip(self.timelines.items(), axes[:, 0], strict=True):
            axis.set_title(title, fontsize=LETTERS, loc="left", wrap=True)
            axis.set_xlim(0, longest)
            _draw_one(axis, timeline, longest)

        label = "time"
        if self.unit:
            label = f"time, {self.unit}"
        axis.set_xlabel(label)
        _explain(figure)
        return figure


def turns_of(kept: Mapping[str, Any]) -> tuple[Timelines, str]:
    """Return a pipeline's turns as a chart in milliseconds, and its caption with the bubbles.

    Args:
        kept: by title, ``Timeline.plain`` in seconds.
    """
    timelines = {}
    bubbles = []
    for title, plain in kept.items():
        timeline = Timeline.of(plain, 1e3)
        timelines[title] = timeline
        bubbles.append(f"{title}: {100 * timeline.bubble:.1f} %")

    caption = (
        "Each number is a micro-batch: blue forward, orange backward, grey waiting. Ideally a "
        "stage waits only for what another stage gives. The bubble is the share of the devices' "
        f"time that is waited: {'; '.join(bubbles)}."
    )
    return Timelines(timelines, "ms"), caption


def _explain(figure: Figure) -> None:
    """Draw a legend: what each colour is, and that a number is a micro-batch."""
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_colour("F", 0.0), label="forward"),
        Patch(color=_colour("B", 0.0), label="backward"),
        Patch(color=_WAITING, label="waiting; a number is a micro-batch"),
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=LETTERS,
    )


def _draw_one(axis: Axes, timeline: Timeline, longest: float) -> None:
    """Draw the rows of one timeline.

    Args:
        axis: to draw on.
        timeline: of all devices.
        longest: the time of the longest one of the chart.
    """
    count = len(timeline.devices)
    stages = 1 + max(span.action.stage for spans in timeline.devices for span in spans)
    for device, spans in enumerate(timeline.devices):
        for action, start, end in spans:
            begin = start - timeline.start
            length = end - start
            depth = action.stage // count * count / stages
            axis.barh(
                device,
                length,
                left=begin,
                height=0.86,
                color=_colour(action.kind, depth),
                edgecolor="white",
                linewidth=0.6,
            )
            if length > longest / 60:
                axis.text(
                    begin + length / 2,
                    device,
                    str(action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                )

    axis.set_yticks(range(count), [f"device {device}" for device in range(count)])
    axis.set_ylim(count - 0.5, -0.5)
    axis.set_facecolor(_WAITING)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _colour(kind: str, depth: float) -> tuple[float, float, float]:
    """Return blue for a forward, orange for a backward.

    Args:
        kind: of an action.
        depth: from 0 to 1: a device's later stages are darker.
    """
    hue = 0.07
    light = 0.48
    if kind == "F":
        hue = 0.58
        light = 0.52
    return colorsys.hls_to_rgb(hue, light - 0.22 * depth, 0.62)
