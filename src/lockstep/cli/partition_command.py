"""``lockstep partition``."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from typing import Any

from lockstep.cli.options import add_settings, job_in
from lockstep.cli.schedule_command import print_timeline
from lockstep.errors import InputError, nearest
from lockstep.tensors.allocator import prepare


def add_partition(commands: Any) -> None:
    """The command's options."""
    parser = commands.add_parser("partition", help="which layers go to which device", allow_abbrev=False)
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument("--devices", default="auto", help="one for each stage: 2, 2xcpu, cuda:0,2 (default: auto)")
    parser.add_argument(
        "--microbatches",
        default="1",
        metavar="M",
        help="of each global batch; auto chooses them by simulation (default: 1)",
    )
    parser.add_argument(
        "--schedule",
        default="auto",
        metavar="NAME",
        help="where micro-batches are chosen: for this one (default: auto)",
    )
    parser.add_argument("--estimate", action="store_true", help="from operations and bytes, without a run")
    parser.add_argument("--memory", metavar="SIZES", help="of each device: 8GiB, or 8GiB,4GiB (default: what it has)")
    add_settings(parser)
    parser.set_defaults(function=_partition)


def _partition(options: argparse.Namespace) -> int:
    """Find the partition that the options ask for, and print it."""
    prepare()
    from lockstep.pipelining.planner.partition import partition
    from lockstep.pipelining.planner.picture import key
    from lockstep.pipelining.planner.plan import plan
    from lockstep.pipelining.schedule import SCHEDULES

    width = shutil.get_terminal_size().columns
    job = job_in(options)
    sizes = [] if options.memory is None else [_bytes(word) for word in options.memory.split(",")]
    memory = None if not sizes else sizes[0] if len(sizes) == 1 else sizes
    if options.microbatches == "auto":
        if options.estimate:
            raise InputError("--microbatches auto needs measured times: leave --estimate out")
        names = [*SCHEDULES, "fitted"]
        if options.schedule not in ("auto", *names):
            raise InputError(f'--schedule: there is no "{options.schedule}"; {nearest(options.schedule, names)}')
        only = None if options.schedule == "auto" else [options.schedule]
        found, choice = plan(job, devices=options.devices, schedules=only, memory=memory)
        print("\n".join(found.lines(width)))
        print()
        print_timeline(choice.best.timeline, width)
        print("\n".join(key(width, [choice.best.timeline])))
        print()
        print("\n".join(textwrap.wrap(choice.why, width)))
        return 0
    if not options.microbatches.isdigit():
        raise InputError(f"--microbatches {options.microbatches}: write a number, or auto")
    found = partition(
        job,
        devices=options.devices,
        microbatches=int(options.microbatches),
        measured=not options.estimate,
        memory=memory,
    )
    print("\n".join(found.lines(width)))
    return 0


_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _bytes(word: str) -> int:
    """``8GiB`` in bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", word.strip().lower())
    try:
        assert match is not None
        return int(float(match[1]) * _UNITS[match[2]])
    except (AssertionError, KeyError, ValueError):
        raise InputError(f"--memory {word}: write a size: 8GiB, 500MiB") from None
