"""What holds ways to train a job against one another: ``lockstep compare``, ``tune`` and
``verify``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from lockstep.cli.options import (
    above_zero,
    add_placement,
    add_settings,
    check_writable,
    job_in,
    strategy_in,
    warm_up,
)
from lockstep.errors import InputError


def add_compare(commands: Any) -> None:
    """Options of ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="measure strategies side by side",
        allow_abbrev=False,
    )
    parser.epilog = "with --epochs N each row is also trained, to compare losses and metrics"
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
        "--csv",
        metavar="FILE",
        help="also write the table to this file",
    )
    add_settings(parser)
    parser.set_defaults(function=_compare)


def _add_measuring(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add how long is measured, and where the results are also written."""
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
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the results to this file",
    )


def _compare(options: argparse.Namespace) -> int:
    """Compare, and return 1 where nothing could be measured."""
    warm_up(options, surely=True)
    from lockstep.compare.compare import compare
    from lockstep.compare.comparison_folder import json_of
    from lockstep.compare.comparison_table import csv_of
    from lockstep.pipelining.device_map import read_map

    check_writable("--json", options.json)
    check_writable("--csv", options.csv)
    training = {}
    if options.epochs is not None:  # each is trained too
        training["epochs"] = options.epochs
        options.epochs = None
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
        told=lambda line: print(line, flush=True),
        **training,
    )
    if options.json is not None:
        Path(options.json).write_text(json_of(found))
    if options.csv is not None:
        Path(options.csv).write_text(csv_of(found))
    return 0 if found.measured else 1


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
        help="find settings that make a job faster on this machine",
        allow_abbrev=False,
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
    parser.set_defaults(function=_tune)


def _tune(options: argparse.Namespace) -> int:
    check_writable("--json", options.json)
    warm_up(options)
    from lockstep.compare.tune import tune

    found = tune(
        job_in(options),
        strategy=options.strategy,
        devices=options.devices,
        rounds=options.rounds,
        seconds=options.seconds,
        told=lambda line: print(line, flush=True),
    )
    if options.json is not None:
        Path(options.json).write_text(json.dumps(found.as_dict(), indent=2))
    return 0


def add_verify(commands: Any) -> None:
    """Options of ``verify``."""
    parser = commands.add_parser(
        "verify",
        help="compare the results with those of one device",
        allow_abbrev=False,
    )
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="use whole batches; by default they may be cut to fewer samples, to save time",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write every number to this file, as JSON; - prints JSON only",
    )
    add_placement(parser)
    add_settings(parser)
    parser.set_defaults(function=_verify)


def _verify(options: argparse.Namespace) -> int:
    """Print what was found: 0 for equal, 3 for not."""
    warm_up(options, surely=options.devices == "auto" and options.strategy in ("ddp", None))
    strategy = strategy_in(options)
    from lockstep.verify import verify

    check_writable("--json", None if options.json == "-" else options.json)
    found = verify(job_in(options), strategy=strategy, devices=options.devices, whole=options.whole)
    if options.json != "-":
        print("\n".join(found.lines(max(60, shutil.get_terminal_size().columns))))
    if options.json is not None:
        # With words for what JSON has no number for: "nan", "inf".
        values = json.loads(
            json.dumps(found.as_dict()), parse_constant=lambda word: str(float(word))
        )
        text = json.dumps(values, indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text)
    return 0 if found else 3
