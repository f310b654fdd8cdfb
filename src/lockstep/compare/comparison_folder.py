"""What a comparison leaves: its folder, the table, the report.

::

    runs/digits-compare-20261121-093000/
      compare.json     all that was found
      report.html      one file, with everything in it (needs the extra `report`)
      figures/         each of its figures as .png
      runs/            with ``epochs``: the run of each
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.compare.advice import best_of
from lockstep.compare.comparison_page import write_page
from lockstep.compare.comparison_table import lines_of
from lockstep.compare.result import Comparison
from lockstep.errors import FolderError, InputError
from lockstep.run.run_folder import json_text


def answer_of(found: Comparison) -> dict[str, Any]:
    """Return all that was found, and the name of the row to take, as plain values."""
    best = best_of(found)
    return {
        **found.as_dict(),
        "best": None if best is None else best.name,
    }


def log_comparison(found: Comparison, log: Callable[[str], None]) -> None:
    """Print the tables and the sentence; write the folder, where there is one.

    Raises:
        FolderError: it can't be written.
    """
    log("")
    for line in lines_of(found, shutil.get_terminal_size().columns):
        log(line)
    if not found.folder:
        return
    folder = Path(found.folder)
    try:
        (folder / "compare.json").write_text(json_text(answer_of(found)))
    except OSError as error:
        raise FolderError(
            f"{folder}: can't be written: {error.strerror}; choose another with --folder"
        ) from error
    try:
        log(f"\nreport: {os.path.relpath(write_page(found))}")
    except FolderError:
        raise
    except InputError as error:
        log(f"\nno report.html: {error}")
    log(f"numbers: {os.path.relpath(found.folder)}/compare.json")
