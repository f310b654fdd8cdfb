"""Timelines of a pipeline, one above the other on one scale: which device works on which micro-batch, and when."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.report.canvas import new_figure
from lockstep.report.charts import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lockstep.timeline import Timeline


TURNS = (
    "Each number is a micro-batch: blue forward, orange backward, grey waiting. Ideally a stage would wait for nothing "
    "but what another gives; the bubble is the share of the devices' time that is waited."
)
"""What should be known to read one of a pipeline."""


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
        """A row for each action: whose timeline, device, stage, kind, micro-batch, start, end."""
        rows = tuple(
            (title, device, span.action.stage, span.action.kind, span.action.microbatch, span.start, span.end)
            for title, timeline in self.timelines.items()
            for device, spans in enumerate(timeline.devices)
            for span in spans
        )
        return Numbers(("", "device", "stage", "kind", "micro-batch", "start", "end"), rows)

    def told(self) -> str:
        """How long each takes, on how many devices."""
        ends = [
            f"{title}: {len(timeline.devices)} devices, {timeline.makespan:.4g} {self.unit}".strip()
            for title, timeline in self.timelines.items()
        ]
        return f"What each device of a pipeline does over time. {'; '.join(ends)}."

    def draw(self, width: float) -> Figure:
        """A row for each device; forwards blue, backwards orange, with the number of the micro-batch."""
        timelines = self.timelines
        rows = sum(len(timeline.devices) for timeline in timelines.values())
        figure = new_figure(width, 0.7 + 0.42 * rows + 0.75 * len(timelines), "a timeline")
        heights = [len(timeline.devices) + 1 for timeline in timelines.values()]
        axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
        longest = max((timeline.makespan for timeline in timelines.values()), default=0.0)
        for (title, timeline), axis in zip(timelines.items(), axes[:, 0], strict=True):
            _draw_one(axis, title, timeline, longest)
        axes[-1, 0].set_xlabel(f"time, {self.unit}" if self.unit else "time")
        return figure


def _draw_one(axis: Axes, title: str, timeline: Timeline, longest: float) -> None:
    stages = 1 + max((span.action.stage for mine in timeline.devices for span in mine), default=0)
    axis.set_title(title, fontsize=10, loc="left", wrap=True)
    for device, spans in enumerate(timeline.devices):
        for action, start, end in spans:
            begin = start - timeline.start
            colour = _colour(action.kind, action.stage // len(timeline.devices), stages // len(timeline.devices))
            axis.barh(device, end - start, left=begin, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
            if end - start > longest / 110:
                label = f"{action.microbatch}"
                middle = begin + (end - start) / 2
                axis.text(middle, device, label, ha="center", va="center", fontsize=7, color="white")
    axis.set_yticks(range(len(timeline.devices)), [f"device {d}" for d in range(len(timeline.devices))])
    axis.set_ylim(len(timeline.devices) - 0.5, -0.5)
    axis.set_xlim(0, longest)
    axis.set_facecolor("#eeeeee")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _colour(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Forwards blue, backwards orange; a device's later stages darker."""
    hue, light = (0.58, 0.52) if kind == "F" else (0.07, 0.48)
    return colorsys.hls_to_rgb(hue, light - 0.22 * (chunk / max(chunks, 1)), 0.62)
