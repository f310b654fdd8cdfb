"""What the command has for ``verify``: its options, and what is printed. Nothing here imports torch at the top."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from typing import Any

from lockstep.cli.options import check_writable


def add_verify(parser: argparse.ArgumentParser) -> None:
    """``lockstep verify``, without placement, the job's knobs and settings."""
    parser.add_argument("job", help="a Python file with a `job`")
    parser.add_argument("--whole", action="store_true", help="never cut batches to fewer samples to save time")
    parser.add_argument("--json", metavar="FILE", help="also write what was found to this file; - prints that alone")


def verify(options: argparse.Namespace, strategy: Any, knobs: Mapping[str, str], settings: Mapping[str, Any]) -> int:
    """Verify the job that the options name, and print what was found: 0 for equal, 3 for not."""
    from lockstep.jobfile import JobFile
    from lockstep.verify import verify as verified

    if options.json not in (None, "-"):
        check_writable("--json", options.json)
    job = JobFile(options.job, dict(knobs), dict(settings))
    found = verified(job, strategy=strategy, devices=options.devices, whole=options.whole)
    if options.json != "-":
        print("\n".join(found.lines(max(60, shutil.get_terminal_size().columns))))
    if options.json is not None:
        text = json.dumps(_plain(found.as_dict()), indent=2)
        if options.json == "-":
            print(text)
        else:
            with open(options.json, "w") as file:
                file.write(text)
    return 0 if found else 3


def _plain(value: Any) -> Any:
    """With words for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
