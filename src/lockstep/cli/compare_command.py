"""What the command has for comparisons: options, and what they mean. Nothing here imports torch at the top."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lockstep.cli.options import above_zero, check_writable
from lockstep.errors import InputError


def add_compare(parser: argparse.ArgumentParser) -> None:
    """``lockstep compare``, without the job's knobs and settings."""
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument("--strategies", metavar="NAMES", help="with commas between (default: single,dp,ddp,mp,pp)")
    parser.add_argument("--devices", default="auto", help="auto, 4, 2xcpu, cuda, cuda:0,2 (default: auto)")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="values to try, with commas between: microbatches=1,2,4, batch_size=32,64, devices=2,4; may be repeated",
    )
    parser.add_argument("--map", metavar="FILE_OR_JSON", help="which layer is on which device, under mp and pp")
    parser.add_argument("--with", dest="peers", metavar="NAMES", help="also by other means: torch, fabric, accelerate")
    parser.add_argument("--rounds", type=above_zero(int), default=5, help="turns of each (default: 5)")
    parser.add_argument("--seconds", type=above_zero(float), default=2.0, help="of a turn, at least (default: 2)")
    parser.add_argument("--no-parity", action="store_true", help="don't hold the numbers against one device's")
    parser.add_argument("--folder", default="runs", help="where the folder with the report is made (default: runs)")
    parser.add_argument("--json", metavar="FILE", help="also write what was found to this file")
    parser.add_argument("--csv", metavar="FILE", help="also write the table to this file")


def compare(options: argparse.Namespace, knobs: Mapping[str, str], settings: Mapping[str, Any]) -> int:
    """Compare what the options ask for. 1 where nothing could be measured."""
    from lockstep.compare.compare import compare as measured
    from lockstep.compare.comparison_folder import json_of
    from lockstep.compare.comparison_table import csv_of
    from lockstep.jobfile import JobFile
    from lockstep.pipelining.device_map import read_map

    files = {"--json": options.json, "--csv": options.csv}
    for option, file in files.items():
        if file is not None:
            check_writable(option, file)
    found = measured(
        JobFile(options.job, dict(knobs), {k: v for k, v in settings.items() if k != "epochs"}),
        strategies=_names(options.strategies),
        devices=options.devices,
        sweep=dict(_swept(word) for word in options.sweep),
        device_map=None if options.map is None else read_map(options.map),
        peers=_names(options.peers) or (),
        rounds=options.rounds,
        seconds=options.seconds,
        parity=not options.no_parity,
        folder=options.folder,
        told=lambda line: print(line, flush=True),
        **{k: v for k, v in settings.items() if k == "epochs"},
    )
    for option, text in (("--json", json_of), ("--csv", csv_of)):
        if files[option] is not None:
            with open(files[option], "w") as file:
                file.write(text(found))
    return 0 if found.measured else 1


def report(folder: str) -> int:
    """Write the page of a run, or once more that of a comparison."""
    import os

    if os.path.isfile(os.path.join(folder, "compare.json")):
        from lockstep.compare.comparison_folder import read
        from lockstep.compare.comparison_page import write_page as of_comparison

        print(of_comparison(read(folder)))
    else:
        from lockstep.training.run_page import write_page as of_run

        print(of_run(folder))
    return 0


def _names(words: str | None) -> list[str] | None:
    return None if words is None else words.replace(",", " ").split()


def _swept(word: str) -> tuple[str, list[str]]:
    key, equals, values = word.partition("=")
    if not equals or not key or not values:
        raise InputError(f"--sweep {word}: write it as --sweep {key or 'microbatches'}=1,2,4")
    return key.replace("-", "_"), [value.strip() for value in values.split(",") if value.strip()]
