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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.compare.comparison_page import write_page
from lockstep.compare.comparison_table import csv_of, lines_of
from lockstep.compare.entries import job_words, option_words
from lockstep.compare.result import Comparison
from lockstep.errors import FolderError, InputError
from lockstep.job import Job
from lockstep.jobfile import JobFile


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
        raise FolderError(
            f"{folder}: can't be written: {error.strerror}; choose another with --folder"
        ) from error


def json_of(found: Comparison) -> str:
    """All that was found."""
    text = json.dumps(found.as_dict(), default=str)
    # JSON has no word for what is not a number, or infinite.
    return json.dumps(json.loads(text, parse_constant=lambda word: None), indent=2) + "\n"


def command(source: Job | JobFile, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What repeats the comparison: a command, or a call where the job isn't a file or a strategy is
    an object.

    ``asked`` are arguments of ``compare``, None for what is as usual; ``settings`` are in
    ``source`` too.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    objects = [
        one
        for one in (*given.get("strategies", ()), given["devices"])
        if not isinstance(one, str | int)
    ]
    if not isinstance(source, JobFile) or objects:
        job = repr(source.path) if isinstance(source, JobFile) else "job"
        values = {**given, **{name: value for name, value in settings.items() if value is not None}}
        return f"lockstep.compare({', '.join([job, *(f'{name}={value!r}' for name, value in values.items())])})"
    words = ["lockstep", "compare", *job_words(source)]
    for name, value in given.items():
        if name == "sweep":
            words += [
                word
                for key, its in value.items()
                for word in ("--sweep", f"{key}={','.join(map(str, its))}")
            ]
        elif name == "parity":
            words.append("--no-parity")
        else:
            words += option_words({name: value})
    return shlex.join([*words, *option_words(source.settings)])


def tell(found: Comparison, say: Callable[[str], None]) -> None:
    """Print the tables and the sentence; write the folder, where there is one."""
    for line in ("", *lines_of(found, shutil.get_terminal_size().columns)):
        say(line)
    if not found.folder:
        return
    write(found)
    try:
        say(f"\nreport: {os.path.relpath(write_page(found))}")
    except FolderError:
        raise
    except InputError as error:
        say(f"\nno report.html: {error}")
    say(f"all that was found: {os.path.relpath(found.folder)}/compare.json and compare.csv")
