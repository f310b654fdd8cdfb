"""What plans a pipeline: ``lockstep partition`` and ``lockstep schedule``."""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.cli.options import Answer, above_zero, add_settings, job_in
from lockstep.errors import InputError, counted, nearest
from lockstep.tensors.allocator import prepare

if TYPE_CHECKING:
    from lockstep.job import Job
    from lockstep.jobfile import JobFile
    from lockstep.launch.devices import Device
    from lockstep.pipelining.timeline import Timeline


def add_partition(commands: Any) -> None:
    """Options of ``partition``."""
    parser = commands.add_parser(
        "partition",
        help="find which layer goes to which device",
        epilog="""\
examples:
  lockstep partition job.py --devices 2 --microbatches auto
  lockstep partition job.py --devices 4xcpu
""",
    )
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument(
        "--devices",
        default="auto",
        help="the devices, one for each stage: 2, 2xcpu, cuda:0,2 (default: auto)",
    )
    parser.add_argument(
        "--strategy", help="a product such as ddp=2xpp=2, to find the stages of one replica"
    )
    parser.add_argument(
        "--microbatches",
        default="1",
        metavar="M",
        help="the number of micro-batches of each global batch; auto chooses it by simulation (default: 1)",
    )
    parser.add_argument(
        "--schedule",
        default="auto",
        metavar="NAME",
        help="the schedule for which the number of micro-batches is chosen (default: auto)",
    )
    add_settings(parser)
    parser.set_defaults(function=_partition)


def _partition(options: argparse.Namespace) -> Answer:
    """Find the partition that the options ask for, and print it."""
    prepare()
    from lockstep.jobfile import the_job
    from lockstep.launch.devices import parse
    from lockstep.pipelining.planner.partition import capacities, partition
    from lockstep.pipelining.planner.plan import planned
    from lockstep.pipelining.planner.schedule_picture import key

    width = shutil.get_terminal_size().columns
    job: Job | JobFile = job_in(options)
    devices = parse(options.devices)
    if options.strategy is not None:
        job, devices = _of_a_replica(options, the_job(job))
    if options.microbatches == "auto":
        only = None
        if options.schedule != "auto":
            only = [_known(options.schedule)]
        capacity = capacities(devices)
        found, choice = planned(the_job(job), devices, schedules=only, capacity=capacity)
        print("\n".join([*found.lines(width), ""]))
        _print_timeline(choice.best.timeline, width)
        print("\n".join([*key(width), "", *textwrap.wrap(choice.why, width)]))
        best = choice.best
        schedule = {"schedule": best.schedule, "microbatches": best.microbatches}
        return 0, asdict(found) | schedule | _numbers(best.timeline)
    if not options.microbatches.isdigit():
        raise InputError(f"--microbatches {options.microbatches}: write a number, or auto")
    found = partition(
        job,
        devices=devices,
        microbatches=int(options.microbatches),
    )
    print("\n".join(found.lines(width)))
    return 0, asdict(found)


def _of_a_replica(options: argparse.Namespace, job: Job) -> tuple[Job, tuple[Device, ...]]:
    """Return the job with what one replica of a product is given of each batch, and its devices.

    Raises:
        InputError: the strategy has no stages.
    """
    from lockstep.launch.devices import parse
    from lockstep.strategies import choose, devices_for
    from lockstep.strategies.pp import PP

    every = parse(devices_for(options.strategy, options.devices))
    strategy = choose(options.strategy, every)
    if not isinstance(strategy, PP):
        raise InputError(
            f"--strategy {options.strategy}: this strategy has no stages: give pp, mp, "
            "ddp=2xpp=2 or ddp=2xmp=2"
        )
    return strategy.seen_by_a_replica(job), every[: strategy.layout(len(every)).devices_per_process]


def add_schedule(commands: Any) -> None:
    """Options of ``schedule``."""
    parser = commands.add_parser(
        "schedule",
        help="draw a pipeline's schedule",
        epilog="""\
examples:
  lockstep schedule --stages 4 --microbatches 8 --schedule gpipe,1f1b
  lockstep schedule --stages 2 --forward 1,2 --backward 2,4 --words
""",
    )
    parser.add_argument(
        "--stages",
        type=int,
        default=4,
        metavar="N",
        help="the number of devices, with a stage on each (default: 4)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="M",
        help="the number of micro-batches of a global batch (default: 8)",
    )
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="gpipe, 1f1b or interleaved (two stages on each device); several with commas "
        "between (default: 1f1b)",
    )
    for name in ("--forward", "--backward"):
        what = f"the time of a stage's {name[2:]}, or one for each with commas between (default: 1)"
        parser.add_argument(
            name,
            default="1",
            metavar="TIMES",
            help=what,
        )
    parser.add_argument(
        "--transfer",
        type=float,
        default=0.0,
        metavar="TIME",
        help="the time of a transfer from device to device (default: 0)",
    )
    parser.add_argument(
        "--words",
        action="store_true",
        help="also print the actions: 2F0 is stage 2, forward 0",
    )
    parser.set_defaults(function=_schedule)


def _schedule(options: argparse.Namespace) -> Answer:
    from lockstep.pipelining.planner.schedule_picture import key
    from lockstep.pipelining.schedule import printed

    if not 0 <= options.transfer < math.inf:
        raise InputError(f"--transfer {options.transfer}: a time is a finite number, not negative")
    if options.stages * options.microbatches > _MOST:
        raise InputError(
            f"schedule: {options.stages} stages x {options.microbatches} micro-batches are too "
            "many to simulate: "
            f"at most {_MOST:,} together"
        )
    width = shutil.get_terminal_size().columns
    timelines = {name: _simulated(name, options) for name in options.schedule.split(",")}
    for name, timeline in timelines.items():
        title = (
            f"{name}: {counted(options.stages, 'device')}, "
            f"{counted(options.microbatches, 'micro-batch', 'es')}"
        )
        print("\n".join(textwrap.wrap(title, width)))
        _print_timeline(timeline, width)
        if options.words:
            print(printed([[span.action for span in spans] for spans in timeline.devices]))
    print("\n".join(key(width)))
    return 0, {"schedules": {name: _numbers(timelines[name]) for name in timelines}}


def _numbers(timeline: Timeline) -> dict[str, Any]:
    """Return what ``--json`` writes of a timeline."""
    return {
        "time": timeline.makespan,
        "bubble": timeline.bubble,
        "speed_up": timeline.speed_up,
        "actions": timeline.plain(),
    }


_MOST = 200_000
"""Stages times micro-batches that ``lockstep schedule`` takes: seconds, not minutes."""


def _known(name: str) -> str:
    """Return the name of a schedule, if there is one of that name."""
    from lockstep.pipelining.schedule import SCHEDULES

    if name not in SCHEDULES:
        raise InputError(f'--schedule: there is no "{name}"; {nearest(name, [*SCHEDULES])}')
    return name


def _simulated(name: str, options: argparse.Namespace) -> Timeline:
    from lockstep.pipelining.planner.simulate import simulate
    from lockstep.pipelining.schedule import SCHEDULES, devices_of

    schedule = SCHEDULES[_known(name)](options.stages, options.microbatches)
    stages = len(devices_of(schedule))
    forward = _times(options, "forward", stages)
    backward = _times(options, "backward", stages)
    return simulate(schedule, forward, backward, options.transfer)


def _times(options: argparse.Namespace, which: str, stages: int) -> list[float]:
    """Return a time for each stage.

    One that is given for each device is divided over the device's stages.
    """
    given: str = getattr(options, which)
    try:
        times = [above_zero(float)(word) for word in given.split(",")]
    except ValueError:
        raise InputError(
            f"--{which} {given}: write a time above 0, or one for each stage: 1,2.5,1,1"
        ) from None
    if len(times) == stages and len(times) > 1:
        return times
    if len(times) in (1, options.stages):
        chunks = stages // options.stages
        return [times[s % len(times)] / chunks for s in range(stages)]
    raise InputError(
        f"--{which} {given}: {len(times)} times for {stages} stages; give one, or one for each"
    )


def _print_timeline(timeline: Timeline, width: int) -> None:
    """Print the grid, in colours on a terminal, and below it the bubble."""
    from lockstep.pipelining.planner.schedule_picture import IDLE, grid, summary
    from lockstep.run.terminal import takes_escapes

    lines = grid(timeline, width)
    if takes_escapes():
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
