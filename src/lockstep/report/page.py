"""A page: sections of text, figures and tables, as one HTML file that needs no other, and no
network.

::

    folder/
      report.html        pictures inside of it; each figure also as a table, and as CSV to take away
      figures/NAME.png   each figure as a picture
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
from lockstep.report.canvas import image
from lockstep.report.charts import Cell, Chart, short
from lockstep.report.table import Table
from lockstep.tensors.new_file import write_over


@dataclass(frozen=True)
class Figure:
    """A chart on a page.

    Attributes:
        name: of its files.
        title: what it shows.
        chart: the chart.
        caption: what should be known to read it.
    """

    name: str
    title: str
    chart: Chart
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    parts: Sequence[Figure | Table] = ()
    text: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        title: of the page.
        verdict: the result, in a sentence.
        notes: what has to be known to believe it.
        sections: the parts of the page.
        facts: of the machine and the versions.
        command: the command that repeats it, or "".
        advice: the command that the verdict recommends, or "".
    """

    title: str
    verdict: str
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    advice: str = ""


def write(page: Page, folder: Path) -> Path:
    """Write the page into a folder, and return the path of the HTML file.

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
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    template = environment.from_string((here / "page.html").read_text())
    css = (here / "page.css").read_text()
    figures = folder / "figures"
    out = folder / "report.html"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        sections = []
        for section in page.sections:
            parts = [_shown(part, figures) for part in section.parts]
            sections.append((section, parts))
        write_over(out, template.render(page=page, sections=sections, css=css))
    except OSError as error:
        reason = error.strerror or error
        raise FolderError(f"{folder}: the report can't be written: {reason}") from error
    return out


def _shown(part: Figure | Table, folder: Path) -> dict[str, Any]:
    """Return a part of a section for the template, with its files written."""
    if isinstance(part, Table):
        head: Sequence[str] = part.head
        rows: Sequence[Sequence[Cell]] = part.rows
    else:
        head, rows = part.chart.numbers()

    text = _csv(head, rows)
    write_over(folder / f"{part.name}.csv", text)
    words = []
    wordy = set()  # the columns, counted from 1, that hold sentences rather than numbers
    for row in rows:
        cells = [_word(cell) for cell in row]
        words.append(cells)
        for i, cell in enumerate(cells, start=1):
            if len(cell) > _SENTENCE:
                wordy.add(i)

    shown: dict[str, Any] = {
        "part": part,
        "head": head,
        "rows": words,
        "wordy": wordy,
        "csv": _data("text/csv", text.encode()),
    }
    if isinstance(part, Figure):
        figure = part.chart.draw()
        write_over(folder / f"{part.name}.png", image(figure, "png"))
        shown["picture"] = _data("image/svg+xml", image(figure, "svg"))
    return shown


_SENTENCE = 30
"""Letters of a cell from which on it is read as a sentence."""


def _word(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return short(cell)


def _csv(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name or "name" for name in head])
    writer.writerows(rows)
    return out.getvalue()


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
