"""``lockstep verify``."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from lockstep.cli.options import add_placement, add_settings, check_writable, job_in, strategy_in, warm_up


def add_verify(commands: Any) -> None:
    """The command's options."""
    parser = commands.add_parser("verify", help="the same numbers as one device, or why not", allow_abbrev=False)
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument("--whole", action="store_true", help="never cut batches to fewer samples to save time")
    parser.add_argument("--json", metavar="FILE", help="also write what was found to this file; - prints that alone")
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
        values = json.loads(json.dumps(found.as_dict()), parse_constant=lambda word: str(float(word)))
        text = json.dumps(values, indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text)
    return 0 if found else 3
