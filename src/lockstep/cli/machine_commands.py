"""What looks at this machine: ``lockstep doctor`` and ``devices``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from lockstep.cli.options import Answer


def add_doctor(commands: Any) -> None:
    """Options of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        function=_doctor,
        help="check whether this machine is ready to train",
        epilog="""\
example:
  lockstep doctor --folder /scratch/runs
""",
    )
    parser.add_argument(
        "--folder",
        default="runs",
        help="where runs will be kept (default: runs)",
    )


def _doctor(options: argparse.Namespace) -> Answer:
    """Print what was found: 0 where a training can run, 1 where something is wrong."""
    from lockstep.launch.doctor import findings

    found = []
    for finding in findings(Path(options.folder)):
        found.append(finding)
        print("\n".join(finding.lines()), flush=True)
    is_wrong = any(finding.state == "wrong" for finding in found)
    answer = {"ready": not is_wrong, "findings": list(map(dataclasses.asdict, found))}
    return int(is_wrong), answer


def add_devices(commands: Any) -> None:
    """Options of ``devices``."""
    parser = commands.add_parser(
        "devices",
        function=_devices,
        help="list the available devices",
        epilog="""\
examples:
  lockstep devices
  lockstep devices --strategy ddp=2xpp=2 --devices 4xcpu
""",
    )
    parser.add_argument(
        "--strategy", help="draw what each device holds and reads under this strategy"
    )
    parser.add_argument(
        "--devices",
        default="auto",
        help="the devices of the drawing: auto, 4, 2xcpu, cuda:0,2",
    )


def _devices(options: argparse.Namespace) -> Answer:
    from lockstep.launch.device_table import drawn, machine, table
    from lockstep.launch.devices import accelerators, parse

    print(table())
    if options.strategy is not None:
        from lockstep.strategies import choose, devices_for

        chosen = parse(devices_for(options.strategy, options.devices))
        layout = choose(options.strategy, chosen).layout(len(chosen))
        print()
        for line in drawn(layout, [str(device) for device in chosen]):
            print(line)
    return 0, {"devices": list(map(str, accelerators())), **machine()}
