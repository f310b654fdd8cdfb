"""Timelines of a pipeline, one above the other on one scale: which device works on which
micro-batch, and when.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import counted
from lockstep.report.canvas import new_figure
from lockstep.report.charts import Numbers
from lockstep.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WAITING = "#eeeeee"


@dataclass(frozen=True)
class Timelines:
    """A chart of timelines, simulated or measured."""

    timelines: Mapping[str, Timeline]  # by title: ``{"ideal": ..., "measured": ...}``
    unit: str = ""  # of the time axis

    def numbers(self) -> Numbers:
        """A row for each action: whose timeline, device, stage, kind, micro-batch, start, end."""
        rows = [
            (
                title,
                device,
                span.action.stage,
                span.action.kind,
                span.action.microbatch,
                span.start,
                span.end,
            )
            for title, timeline in self.timelines.items()
            for device, spans in enumerate(timeline.devices)
            for span in spans
        ]
        return ["", "device", "stage", "kind", "micro-batch", "start", "end"], rows

    def told(self) -> str:
        """How long each takes, on how many devices."""
        ends = [
            f"{title}: {counted(len(timeline.devices), 'device')}, {timeline.makespan:.4g} "
            f"{self.unit}".strip()
            for title, timeline in self.timelines.items()
        ]
        return f"What each device of a pipeline does over time. {'; '.join(ends)}."

    def draw(self, width: float) -> Figure:
        """A row for each device; forwards blue, backwards orange, with the number of the
        micro-batch.
        """
        heights = [len(timeline.devices) + 1 for timeline in self.timelines.values()]
        figure = new_figure(width, 1.0 + 0.42 * sum(heights) + 0.33 * len(heights), "a timeline")
        axes = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        longest = max((timeline.makespan for timeline in self.timelines.values()), default=0.0)
        for (title, timeline), axis in zip(self.timelines.items(), axes[:, 0], strict=True):
            _draw_one(axis, title, timeline, longest)
        axes[-1, 0].set_xlabel(f"time, {self.unit}" if self.unit else "time")
        self._explain(figure, narrow=width < 5.0)
        return figure

    def _explain(self, figure: Figure, *, narrow: bool) -> None:
        """A legend: what each colour is, and that a number is a micro-batch."""
        from matplotlib.patches import Patch

        chunks = max(map(_chunks, self.timelines.values()), default=1)
        which = (
            [""] if chunks == 1 else [f", stage {chunk + 1} of a device" for chunk in range(chunks)]
        )
        handles = [
            Patch(color=_colour(kind, chunk, chunks), label=f"{word}{which[chunk]}")
            for chunk in range(chunks)
            for kind, word in (("F", "forward"), ("B", "backward"))
        ]
        handles.append(Patch(color=_WAITING, label="waiting; a number is a micro-batch"))
        columns = (2 if chunks == 1 else 1) if narrow else 3
        figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5
        )


def turns_of(kept: Mapping[str, Any]) -> tuple[Timelines, str]:
    """A pipeline's turns (by title, ``Timeline.plain`` in seconds) as a chart in ms; its caption
    with the bubbles.
    """
    timelines = {title: Timeline.of(one).times(1e3) for title, one in kept.items()}
    bubbles = "; ".join(f"{title}: {100 * one.bubble:.1f} %" for title, one in timelines.items())
    caption = (
        "Each number is a micro-batch: blue forward, orange backward, grey waiting. Ideally a "
        "stage would wait for "
        "nothing but what another gives. The bubble, the share of the devices' time that is "
        f"waited: {bubbles}."
    )
    return Timelines(timelines, "ms"), caption


def _draw_one(axis: Axes, title: str, timeline: Timeline, longest: float) -> None:
    chunks = _chunks(timeline)
    axis.set_title(title, fontsize=10, loc="left", wrap=True)
    for device, spans in enumerate(timeline.devices):
        for action, start, end in spans:
            begin = start - timeline.start
            colour = _colour(action.kind, action.stage // len(timeline.devices), chunks)
            axis.barh(
                device,
                end - start,
                left=begin,
                height=0.86,
                color=colour,
                edgecolor="white",
                linewidth=0.6,
            )
            if end - start > longest / 110:
                middle = begin + (end - start) / 2
                axis.text(
                    middle,
                    device,
                    str(action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                )
    axis.set_yticks(
        range(len(timeline.devices)), [f"device {d}" for d in range(len(timeline.devices))]
    )
    axis.set_ylim(len(timeline.devices) - 0.5, -0.5)
    axis.set_xlim(0, longest)
    axis.set_facecolor(_WAITING)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _chunks(timeline: Timeline) -> int:
    """Stages on each device."""
    stages = 1 + max((span.action.stage for mine in timeline.devices for span in mine), default=0)
    return max(1, stages // max(1, len(timeline.devices)))


def _colour(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Forwards blue, backwards orange; a device's later stages darker."""
    hue, light = (0.58, 0.52) if kind == "F" else (0.07, 0.48)
    return colorsys.hls_to_rgb(hue, light - 0.22 * (chunk / max(chunks, 1)), 0.62)
