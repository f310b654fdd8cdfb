"""What a person reads of a partition: a table with a bar for each stage, and the map to paste."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

from lockstep.errors import counted
from lockstep.pipelining.planner.split import size

if TYPE_CHECKING:
    from lockstep.pipelining.planner.partition import Partition


def lines_of(found: Partition, width: int) -> list[str]:
    """A title, a row and a bar for each stage, and the map, at most ``width`` columns wide."""
    many = len(found.blocks)
    how = f"measured on {found.stages[0].device}" if found.measured else "estimated, not measured"
    what = f"{counted(len(found.stages), 'stage')} of {counted(many, 'block')}"
    title = f"{what}; {how}, a micro-batch of {counted(found.samples, 'sample')}"
    lines = textwrap.wrap(title, width)
    slowest = max(stage.time for stage in found.stages) or 1.0
    names = [str(stage.device) for stage in found.stages]
    head = f"{'stage':<6}{'device':<{max(map(len, [*names, 'device'])) + 1}}"
    cells = f"{'forward':>9}{'backward':>10}{'weights':>10}{'kept':>10}"
    room = width - len(head) - len(cells) - 2
    lines.append((head + cells).rstrip() if room >= 8 else head.rstrip())
    for number, stage in enumerate(found.stages):
        first = f"{number:<6}{names[number]:<{len(head) - 6}}"
        row = (
            f"{_milliseconds(stage.forward):>9}{_milliseconds(stage.backward):>10}"
            f"{size(stage.parameters):>10}{size(stage.activations):>10}"
        )
        if room >= 8:
            lines.append(f"{first}{row}  {_bar(stage.time / slowest, min(room, 24))}".rstrip())
        else:
            what = (
                f"forward {_milliseconds(stage.forward)}, backward {_milliseconds(stage.backward)}, "
                f"weights {size(stage.parameters)}, kept {size(stage.activations)}"
            )
            lines.append(f"{first}{_bar(stage.time / slowest, max(4, min(24, width - len(first))))}".rstrip())
            lines += textwrap.wrap(what, width, initial_indent="      ", subsequent_indent="      ")
        begin, end = stage.blocks[0].name or "the model", stage.blocks[-1].name
        run = begin if len(stage.blocks) == 1 else f"{begin} to {end}, {len(stage.blocks)} blocks"
        fits = f"; {size(stage.need)} of {size(stage.capacity)}" if stage.capacity is not None else ""
        lines += textwrap.wrap(run + fits, width, initial_indent="      ", subsequent_indent="      ")
    if len(found.stages) > 1:
        lines += textwrap.wrap(f"at most {found.speed_up:.3g} times as fast as one device", width)
    for note in found.notes:
        lines += textwrap.wrap(f"note: {note}", width)
    items = ", ".join(f"{json.dumps(name)}: {stage}" for name, stage in found.device_map.items())
    pasted = f"device_map={{{items}}}"
    return [
        *lines,
        *textwrap.wrap("below, for MP and PP; --map takes what is in braces, or a file of it", width),
        "",
        *textwrap.wrap(pasted, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False),
    ]


def _bar(share: float, width: int) -> str:
    """A bar of up to ``width`` characters, to an eighth of one."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    if value < 0.0995:
        return f"{seconds * 1e6:.2f} µs" if value < 0.00995 else f"{seconds * 1e6:.3g} µs"
    return f"{value:.3g} ms" if value < 999.5 else f"{value:,.0f} ms"
