"""The picture of a timeline, simulated or measured: a grid of characters for the terminal.

::

    0  F0 F1 F2 F3 ········· B0 F4 B1 F5 B2 ··· B3  a device's actions, as long as they took; it waits in the dots
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.pipelining.timeline import Span, Timeline

IDLE = "·"
LONG = "─"
CUT = "…"
_NAME = "0123456789FB─"

KEY = (
    "F0 is the forward of micro-batch 0, B0 its backward (2F0: on stage 2), ··· a device that "
    "waits, F0── an action that goes on, … the rest, left out. "
    "Bubble: the share of the devices' time that is waited; speed-up: over one device that does "
    "the same alone; held: forward is done and backward is not, for each device"
)
"""What should be known to read a grid and the line below it."""


def grid(timeline: Timeline, width: int = 80) -> list[str]:
    """Draw a line for each device, at most ``width`` columns wide.

    The scale is one for all: an action of the usual length is as wide as its name. What is beyond
    the terminal is left out: the same goes on and on.

    Args:
        timeline: simulated or measured.
        width: columns at most.
    """
    spans = list(itertools.chain(*timeline.devices))
    if not spans:
        return []
    stages = {span.action.stage for span in spans}
    is_one_each = len(stages) == len(timeline.devices)
    names = {}
    for span in spans:
        action = span.action
        name = str(action)
        if is_one_each:
            name = f"{action.kind}{action.microbatch}"
        names[action] = name
    longest = max(map(len, names.values()))
    last_device = len(timeline.devices) - 1
    digits = len(str(last_device))
    room = max(width - digits - 2, longest + len(CUT))
    scale = _scale(timeline, longest + 1)
    wide = round(timeline.makespan * scale)
    if room < wide <= 1.15 * room:
        scale *= room / wide  # a little narrower is better than cut
    lines = []
    for device, spans_here in enumerate(timeline.devices):
        row = _row(spans_here, timeline, scale, names)
        if len(row) > room:
            # Half a name would be another one.
            row = row[: room - len(CUT)].rstrip(_NAME) + CUT
        lines.append(f"{device:>{digits}}  {row}".rstrip())
    return lines


def lines_of(title: str, timeline: Timeline, width: int = 80) -> list[str]:
    """Give the title, the grid, and the bubble below it."""
    lines = textwrap.wrap(f"{title}:", width)
    lines += grid(timeline, width)
    lines += textwrap.wrap(summary(timeline), width)
    return lines


def _scale(timeline: Timeline, cell: int) -> float:
    """Find the columns for each unit of time: a short action has room for its name, unless it is
    much shorter than most.
    """
    spans = itertools.chain(*timeline.devices)
    lengths = sorted(span.end - span.start for span in spans)
    usual = statistics.median(lengths)
    short = lengths[len(lengths) // 4]
    if not usual:
        return 1.0
    return cell / max(short, usual / 3)


def _row(
    spans: Sequence[Span],
    timeline: Timeline,
    scale: float,
    names: Mapping[Any, str],
) -> str:
    """Draw one device's line, all of it.

    Args:
        spans: of the device.
        timeline: of all devices.
        scale: columns for each unit of time.
        names: of the actions.
    """
    length = round(timeline.makespan * scale)
    row = [IDLE] * max(1, length)
    for action, start, end in spans:
        first = _column((start - timeline.start) * scale)
        last = _column((end - timeline.start) * scale)
        columns = max(1, last - first)
        name = names[action]
        if len(name) > columns:  # too short for its name
            name = action.kind
        if columns > len(name):  # the last column stays empty, so that neighbours are told apart
            name = name.ljust(columns - 1, LONG) + " "
        row[first : first + columns] = name
    return "".join(row)


def _column(place: float) -> int:
    """Give the nearest column; halves go up, so that equal lengths have equal columns wherever they
    begin.
    """
    return int(place + 0.5 + 1e-6)


def summary(timeline: Timeline) -> str:
    """``bubble 27.3 %, speed-up 2.91; micro-batches held at most: 4 3 2 1``; ``KEY`` explains it.

    Of a device with two stages, what one of them holds of a micro-batch counts as half of one.
    """
    stages = {span.action.stage for span in itertools.chain(*timeline.devices)}
    part = len(timeline.devices) / max(len(stages), 1)
    peaks = timeline.held(dict.fromkeys(stages, part))
    held = [f"{peak:.3g}" for peak in peaks]
    if len(held) > 8:
        held[8:] = ["..."]
    bubble = f"bubble {100 * timeline.bubble:.1f} %"
    speed_up = f"speed-up {timeline.speed_up:.3g}"
    return f"{bubble}, {speed_up}; micro-batches held at most: {' '.join(held)}"


def key(width: int = 80) -> list[str]:
    """``KEY``, at most ``width`` columns wide."""
    return textwrap.wrap(KEY, width, break_on_hyphens=False)
