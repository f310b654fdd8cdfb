"""What plans a pipeline: ``lockstep partition``."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import asdict
from typing import Any

from lockstep.cli.options import Answer, add_settings, job_in
from lockstep.errors import InputError, nearest
from lockstep.tensors.allocator import prepare


def add_partition(commands: Any) -> None:
    """Options of ``partition``."""
    parser = commands.add_parser(
        "partition",
        function=_partition,
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


def _partition(options: argparse.Namespace) -> Answer:
    """Find the partition that the options ask for, and print it."""
    prepare()
    from lockstep.jobfile import the_job
    from lockstep.launch.devices import parse
    from lockstep.pipelining.planner.partition import capacities, partition
    from lockstep.pipelining.planner.plan import planned

    width = shutil.get_terminal_size().columns
    job = job_in(options)
    devices = parse(options.devices)
    if options.microbatches == "auto":
        only = None
        if options.schedule != "auto":
            only = [_known(options.schedule)]
        capacity = capacities(devices)
        found, choice = planned(the_job(job), devices, schedules=only, capacity=capacity)
        print("\n".join([*found.lines(width), "", *textwrap.wrap(choice.why, width)]))
        best = choice.best
        return 0, asdict(found) | {
            "schedule": best.schedule,
            "microbatches": best.microbatches,
            "time": best.seconds,
            "bubble": best.timeline.bubble,
        }
    if not options.microbatches.isdigit():
        raise InputError(f"--microbatches {options.microbatches}: write a number, or auto")
    found = partition(
        job,
        devices=devices,
        microbatches=int(options.microbatches),
    )
    print("\n".join(found.lines(width)))
    return 0, asdict(found)


def _known(name: str) -> str:
    """Return the name of a schedule, if there is one of that name."""
    from lockstep.pipelining.schedule import SCHEDULES

    if name not in SCHEDULES:
        raise InputError(f'--schedule: there is no "{name}"; {nearest(name, [*SCHEDULES])}')
    return name
