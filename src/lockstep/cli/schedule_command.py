"""``lockstep schedule``, and how a timeline is printed."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.options import above_zero
from lockstep.errors import InputError, counted, nearest

if TYPE_CHECKING:
    from lockstep.report.timeline import Timeline


def add_schedule(commands: Any) -> None:
    """The command's options."""
    parser = commands.add_parser("schedule", help="a pipeline's schedule as a picture", allow_abbrev=False)
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="devices, with a stage on each (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="of a global batch (default: 8)")
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved (two stages on each device) or fitted (to the times); several with commas "
        "between (default: 1f1b)",
    )
    for name in ("--forward", "--backward"):
        what = "of a stage, or of each with commas between (default: 1)"
        parser.add_argument(name, default="1", metavar="TIMES", help=what)
    parser.add_argument(
        "--transfer", type=float, default=0.0, metavar="TIME", help="from device to device (default: 0)"
    )
    parser.add_argument("--words", action="store_true", help="also print the actions: 2F0 is stage 2, forward 0")
    parser.add_argument("--out", metavar="FILE", help="also draw it: .png, .svg or .pdf (needs matplotlib)")
    parser.set_defaults(function=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from lockstep.pipelining.planner.picture import draw, key
    from lockstep.pipelining.schedule import printed

    if not 0 <= options.transfer < math.inf:
        raise InputError(f"--transfer {options.transfer}: a time is a finite number, not negative")
    if options.stages * options.microbatches > _MOST:
        raise InputError(
            f"schedule: {options.stages} stages x {options.microbatches} micro-batches are too many to simulate: "
            f"at most {_MOST:,} together"
        )
    if options.out is not None:
        from lockstep.report.canvas import check_file

        check_file(Path(options.out), "--out")
    width = shutil.get_terminal_size().columns
    timelines = {name: _simulated(name, options) for name in options.schedule.split(",")}
    for name, timeline in timelines.items():
        title = f"{name}: {counted(options.stages, 'device')}, {counted(options.microbatches, 'micro-batch', 'es')}"
        print("\n".join(textwrap.wrap(title, width)))
        print_timeline(timeline, width)
        if options.words:
            print(printed([[span.action for span in spans] for spans in timeline.devices]))
    print("\n".join(key(width, timelines.values())))
    if options.out is not None:
        draw(timelines, options.out)
    return 0


_MOST = 200_000
"""Stages times micro-batches that ``lockstep schedule`` takes: seconds, not minutes."""


def _simulated(name: str, options: argparse.Namespace) -> Timeline:
    from lockstep.pipelining.planner.fitted_schedule import fitted
    from lockstep.pipelining.planner.simulate import simulate
    from lockstep.pipelining.schedule import SCHEDULES, devices_of

    if name == "fitted":
        forward, backward = (_times(options, which, options.stages) for which in ("forward", "backward"))
        schedule = fitted(range(options.stages), options.microbatches, forward, backward, options.transfer)
    elif name in SCHEDULES:
        schedule = SCHEDULES[name](options.stages, options.microbatches)
        stages = len(devices_of(schedule))
        forward, backward = (_times(options, which, stages) for which in ("forward", "backward"))
    else:
        raise InputError(f'--schedule: there is no "{name}"; {nearest(name, [*SCHEDULES, "fitted"])}')
    return simulate(schedule, forward, backward, options.transfer)


def _times(options: argparse.Namespace, which: str, stages: int) -> list[float]:
    """A time for each stage. One that is given for each device is divided over the device's stages."""
    said: str = getattr(options, which)
    try:
        times = [above_zero(float)(word) for word in said.split(",")]
    except ValueError:
        raise InputError(f"--{which} {said}: write a time above 0, or one for each stage: 1,2.5,1,1") from None
    if len(times) == stages and len(times) > 1:
        return times
    if len(times) in (1, options.stages):
        chunks = stages // options.stages
        return [times[s % len(times)] / chunks for s in range(stages)]
    raise InputError(f"--{which} {said}: {len(times)} times for {stages} stages; give one, or one for each")


def print_timeline(timeline: Timeline, width: int) -> None:
    """The grid, in colours on a terminal, and below it the bubble."""
    from lockstep.pipelining.planner.picture import IDLE, grid, summary

    lines = grid(timeline, width)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line in lines:
            text = Text(line, no_wrap=True, overflow="crop")
            text.highlight_regex(r"\d*F\d*─*", "cyan")
            text.highlight_regex(r"\d*B\d*─*", "dark_orange3")
            text.highlight_regex(f"{IDLE}+", "bright_black")
            console.print(text)
    else:
        print("\n".join(lines))
    for line in textwrap.wrap(summary(timeline), width):
        print(line)
