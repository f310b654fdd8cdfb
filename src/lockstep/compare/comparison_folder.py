"""What a comparison leaves: its folder, the command that repeats it, the table, the report.

::

    runs/digits-compare-20261121-093000/
      compare.json     all that was found
      compare.csv      a line for each row
      report.html      one file, with everything in it (needs the extra `report`)
      figures/         each of its figures as .png, each of its tables as .csv
      runs/            with ``epochs``: the run of each
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.compare.comparison_page import write_page
from lockstep.compare.comparison_table import csv_of, lines_of
from lockstep.compare.result import Comparison, plain
from lockstep.errors import FolderError, InputError
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Devices
from lockstep.launch.run_folder import RunFolder
from lockstep.strategies import Strategy


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    strategies: Sequence[str | Strategy] | None
    devices: Devices
    sweep: Mapping[str, Sequence[Any]]
    device_map: Mapping[str, int] | None
    peers: tuple[str, ...]
    rounds: int
    seconds: float
    parity: bool
    settings: Mapping[str, Any]


def new_folder(parent: str | Path, job: Job | JobFile) -> Path:
    """A folder of this comparison's own.

    Raises:
        FolderError: it can't be made.
    """
    return RunFolder.new(parent, f"{job.name if isinstance(job, JobFile) else 'job'}-compare").path


def remove(folder: Path) -> None:
    """Take it away: nothing came of it."""
    shutil.rmtree(folder, ignore_errors=True)


def read(folder: str | Path) -> Comparison:
    """The comparison that is kept in a folder.

    Raises:
        FolderError: there is none.
    """
    path = Path(folder) / "compare.json"
    try:
        return Comparison.of({**json.loads(path.read_text()), "folder": str(folder)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{path}: no comparison can be read there ({error})") from error


def write(found: Comparison) -> None:
    """Write ``compare.json`` and ``compare.csv`` in its folder.

    Raises:
        FolderError: they can't be written.
    """
    folder = Path(found.folder)
    try:
        (folder / "compare.json").write_text(json_of(found))
        (folder / "compare.csv").write_text(csv_of(found))
    except OSError as error:
        raise FolderError(f"{folder}: can't be written: {error.strerror}; choose another with --folder") from error


def json_of(found: Comparison) -> str:
    """All that was found."""
    return json.dumps(plain(found.as_dict()), indent=2, default=str) + "\n"


def command(source: Job | JobFile, asked: Asked) -> str:
    """What repeats the comparison: a command, or a call where the job isn't a file."""
    names = [item for item in asked.strategies or () if isinstance(item, str)]
    has_own = len(names) < len(asked.strategies or ())  # with settings that the command has no words for
    if isinstance(source, JobFile) and not has_own and isinstance(asked.devices, str | int):
        words = ["lockstep", "compare", source.path]
        words += [word for name, value in source.knobs.items() for word in ("--set", f"{name}={value}")]
        if names:
            words += ["--strategies", ",".join(names)]
        words += ["--devices", str(asked.devices)]
        for key, values in asked.sweep.items():
            words += ["--sweep", f"{key}={','.join(map(str, values))}"]
        if asked.device_map is not None:
            words += ["--map", json.dumps(asked.device_map)]
        if asked.peers:
            words += ["--with", ",".join(asked.peers)]
        words += ["--rounds", str(asked.rounds), "--seconds", f"{asked.seconds:g}"]
        words += [] if asked.parity else ["--no-parity"]
        for name, value in {**source.settings, **asked.settings}.items():
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value).lower()]
        return shlex.join(words)
    given = {
        "strategies": asked.strategies and list(asked.strategies),
        "devices": asked.devices,
        "sweep": dict(asked.sweep) or None,
        "device_map": asked.device_map,
        "peers": list(asked.peers) or None,
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "parity": None if asked.parity else False,
        **asked.settings,
    }
    job = repr(source.path) if isinstance(source, JobFile) else "job"
    return f"lockstep.compare({', '.join([job, *(f'{k}={v!r}' for k, v in given.items() if v is not None)])})"


def tell(found: Comparison, say: Callable[[str], None]) -> None:
    """Print the tables and the sentence; write the folder, where there is one."""
    say("")
    for line in lines_of(found, shutil.get_terminal_size().columns):
        say(line)
    if not found.folder:
        return
    write(found)
    say("")
    try:
        say(f"report: {os.path.relpath(write_page(found))}")
    except FolderError:
        raise
    except InputError as error:
        say(f"no report.html: {error}")
    say(f"all that was found: {os.path.relpath(found.folder)}/compare.json and compare.csv")
