"""A page: sections of text, figures and tables, as one HTML file that needs no other, and no
network.

::

    folder/
      report.html        pictures inside of it; each figure also as a table, and as CSV to take away
      figures/NAME.png   the same pictures
      figures/NAME.csv   the same tables
"""

from __future__ import annotations

import base64
import csv
import importlib.resources
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import FolderError, InputError
from lockstep.report.canvas import png
from lockstep.report.charts import Bars, Cell, Lines, Stacks, short
from lockstep.report.timeline_charts import Timelines
from lockstep.tensors.new_file import write_over

WIDE, SLIM = 8.6, 3.8
"""Inches of a drawing for a desk, and for a telephone."""


@dataclass(frozen=True)
class Figure:
    """A chart on a page."""

    name: str  # of its files
    title: str
    chart: Bars | Stacks | Lines | Timelines
    caption: str = ""  # what should be known to read it


@dataclass(frozen=True)
class Table:
    """A table on a page."""

    name: str  # of its file
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]  # of words, as they are shown
    caption: str = ""  # what should be known to read it


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    parts: Sequence[Figure | Table] = ()
    text: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    verdict: str  # what came out, in a sentence
    notes: Sequence[str] = ()  # what has to be known to believe it
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()  # of the machine and the versions
    command: str = ""  # what repeats it; "" where there is none
    advice: str = ""  # the command that the verdict comes to; "" where there is none


def write(page: Page, folder: Path) -> Path:
    """Write the page into a folder; gives the path of the HTML file.

    Raises:
        InputError: matplotlib or jinja2 isn't installed.
        FolderError: the files can't be written.
    """
    try:
        import jinja2
        import matplotlib.figure  # noqa: F401 — so that nothing is half written
    except ImportError as error:
        raise InputError(
            f"a report needs {error.name}: pip install 'torch-lockstep[report]'"
        ) from None
    here = importlib.resources.files("lockstep.report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.from_string((here / "page.html").read_text())
    figures = folder / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        sections = [(one, [_shown(part, figures) for part in one.parts]) for one in page.sections]
        out = folder / "report.html"
        write_over(
            out, template.render(page=page, sections=sections, css=(here / "page.css").read_text())
        )
    except OSError as error:
        raise FolderError(
            f"{folder}: the report can't be written: {error.strerror or error}"
        ) from error
    return out


def _shown(part: Figure | Table, folder: Path) -> dict[str, Any]:
    """A part of a section as the template has it, with its files written."""
    head, rows = (part.head, part.rows) if isinstance(part, Table) else part.chart.numbers()
    text = _csv(head, rows)
    write_over(folder / f"{part.name}.csv", text)
    words = [
        ["" if cell is None else cell if isinstance(cell, str) else short(cell) for cell in row]
        for row in rows
    ]
    # Columns, counted from 1, whose cells are sentences rather than numbers.
    wordy = {
        i for i, column in enumerate(zip(*words, strict=True), 1) if max(map(len, column)) > 30
    }
    shown: dict[str, Any] = {
        "part": part,
        "head": head,
        "rows": words,
        "wordy": wordy,
        "csv": _data("text/csv", text),
    }
    if isinstance(part, Figure):
        wide = png(part.chart.draw(WIDE))
        write_over(folder / f"{part.name}.png", wide)
        shown["told"] = part.chart.told()
        shown["wide"] = _data("image/png", wide)
        shown["slim"] = _data("image/png", png(part.chart.draw(SLIM)))
    return shown


def _csv(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name" if i == 0 and not name else name for i, name in enumerate(head)])
    writer.writerows(rows)
    return out.getvalue()


def _data(kind: str, content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"
