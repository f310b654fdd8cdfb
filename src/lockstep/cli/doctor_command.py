"""``lockstep doctor``: whether this machine is ready to train."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from lockstep.cli.options import check_writable


def add_doctor(commands: Any) -> None:
    """Options of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine is ready to train",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder",
        default="runs",
        help="where runs will be kept (default: runs)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write what was found to this file, as JSON; - prints JSON only",
    )
    parser.set_defaults(function=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    """Print what was found: 0 where a training can run, 1 where something is wrong."""
    check_writable("--json", None if options.json == "-" else options.json)
    from lockstep.launch.doctor import findings

    found = []
    for finding in findings(Path(options.folder)):
        found.append(finding)
        if options.json != "-":
            print("\n".join(finding.lines()), flush=True)
    text = json.dumps([dataclasses.asdict(finding) for finding in found], indent=2)
    if options.json == "-":
        print(text)
    elif options.json is not None:
        Path(options.json).write_text(text)
    return 1 if any(finding.state == "wrong" for finding in found) else 0
