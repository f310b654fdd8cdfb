"""What holds ways to train a job against one another: ``lockstep compare``, ``tune`` and
``verify``.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

from lockstep.cli.options import (
    Answer,
    above_zero,
    add_placement,
    add_quiet,
    add_settings,
    job_in,
    strategy_in,
    warm_up,
)
from lockstep.errors import InputError


def add_compare(commands: Any) -> None:
    """Options of ``compare``."""
    parser = commands.add_parser(
        "compare",
        function=_compare,
        help="measure strategies side by side",
        epilog="""\
examples:
  lockstep compare job.py --strategies single,ddp,pp --devices 2
  lockstep compare job.py --devices 2 --sweep microbatches=2,4,8 --epochs 3

With --epochs each row is also trained, to compare losses and metrics.
""",
    )
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument(
        "--strategies",
        metavar="NAMES",
        help="names with commas between (default: single,dp,ddp,mp,pp)",
    )
    parser.add_argument(
        "--devices",
        default="auto",
        help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="values to try, with commas between: microbatches=1,2,4, batch_size=32,64, "
        "devices=2,4; may be repeated",
    )
    parser.add_argument(
        "--map",
        metavar="FILE_OR_JSON",
        help="which layer is on which device, under mp and pp",
    )
    _add_measuring(parser, rounds=5)
    parser.add_argument(
        "--no-parity",
        action="store_true",
        help="don't compare the results with those of one device",
    )
    parser.add_argument(
        "--folder",
        default="runs",
        help="where the folder with the report is made (default: runs)",
    )
    parser.add_argument(
        "--epochs",
        metavar="VALUE",
        help="also train each row for this number of epochs (default: no row is trained)",
    )
    add_settings(parser, without=["epochs"])


def _add_measuring(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add how long is measured, and whether that is logged."""
    parser.add_argument(
        "--rounds",
        type=above_zero(int),
        default=rounds,
        help=f"the number of timed turns of each row (default: {rounds})",
    )
    parser.add_argument(
        "--seconds",
        type=above_zero(float),
        default=2.0,
        help="the length of each turn in seconds, at least (default: 2)",
    )
    add_quiet(parser)


def _compare(options: argparse.Namespace) -> Answer:
    """Compare; the code is 1 where nothing could be measured."""
    warm_up(options, surely=True)
    from lockstep.compare.advice import sentence
    from lockstep.compare.compare import compare
    from lockstep.compare.comparison_folder import answer_of
    from lockstep.pipelining.device_map import read_map

    training = {}
    if options.epochs is not None:  # each is trained too
        training["epochs"] = options.epochs
    found = compare(
        job_in(options),
        strategies=_names(options.strategies),
        devices=options.devices,
        sweep=dict(_swept(word) for word in options.sweep),
        device_map=None if options.map is None else read_map(options.map),
        rounds=options.rounds,
        seconds=options.seconds,
        parity=not options.no_parity,
        folder=options.folder,
        log=_log(options),
        **training,
    )
    if options.quiet:
        for row in found.rows:
            if row.reason:
                print(f"{row.name}: failed: {row.reason}", file=sys.stderr)
        print(sentence(found))
    return 0 if found.measured else 1, answer_of(found)


def _log(options: argparse.Namespace) -> Callable[[str], None] | None:
    """Return what prints the lines of a report."""
    return None if options.quiet else functools.partial(print, flush=True)


def _names(words: str | None) -> list[str] | None:
    return None if words is None else words.replace(",", " ").split()


def _swept(word: str) -> tuple[str, list[str]]:
    key, equals, values = word.partition("=")
    if not equals or not key or not values:
        raise InputError(f"--sweep {word}: write it as --sweep {key or 'microbatches'}=1,2,4")
    return key.replace("-", "_"), [value.strip() for value in values.split(",") if value.strip()]


def add_tune(commands: Any) -> None:
    """Options of ``tune``."""
    parser = commands.add_parser(
        "tune",
        function=_tune,
        help="find settings that make a job faster on this machine",
        epilog="""\
example:
  lockstep tune job.py --devices 2 --seconds 1
""",
    )
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument(
        "--strategy", help="try this strategy only (default: dp, ddp, and one device)"
    )
    parser.add_argument(
        "--devices",
        default="auto",
        help="the devices that may be used (default: all accelerators or cores)",
    )
    _add_measuring(parser, rounds=3)
    add_settings(parser)


def _tune(options: argparse.Namespace) -> Answer:
    warm_up(options)
    from lockstep.compare.tune import tune

    job = job_in(options)
    found = tune(
        job,
        strategy=options.strategy,
        devices=options.devices,
        rounds=options.rounds,
        seconds=options.seconds,
        log=_log(options),
    )
    if options.quiet:
        print(found.changed.line(job))
    return 0, found.as_dict()


def add_verify(commands: Any) -> None:
    """Options of ``verify``."""
    parser = commands.add_parser(
        "verify",
        function=_verify,
        help="compare the results with those of one device",
        epilog="""\
examples:
  lockstep verify job.py --strategy ddp --devices 2
  lockstep verify job.py --strategy pp --microbatches 4 --devices 2 --whole
""",
    )
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="use whole batches; by default they may be cut to fewer samples, to save time",
    )
    add_placement(parser)
    add_settings(parser)


def _verify(options: argparse.Namespace) -> Answer:
    """Print what was found: 0 for equal, 3 for not."""
    warm_up(options, surely=options.devices == "auto" and options.strategy in ("ddp", None))
    strategy = strategy_in(options)
    from lockstep.verify import verify

    found = verify(job_in(options), strategy=strategy, devices=options.devices, whole=options.whole)
    print("\n".join(found.lines(max(60, shutil.get_terminal_size().columns))))
    return 0 if found else 3, found.as_dict()
