"""A page: sections of text, figures and tables, as one HTML file that needs no other, and no
network.

::

    folder/
      report.html        pictures inside of it
      figures/NAME.png   each figure as a picture
"""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import FolderError, InputError
from lockstep.report.charts import Bars, Lines, image
from lockstep.report.table import Table
from lockstep.tensors.new_file import write_over


@dataclass(frozen=True)
class Figure:
    """A chart on a page.

    Attributes:
        name: of its file.
        title: what it shows.
        chart: the chart.
        caption: what should be known to read it.
    """

    name: str
    title: str
    chart: Bars | Lines
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
        advice: the command that the verdict recommends, or "".
    """

    title: str
    verdict: str
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    facts: Sequence[tuple[str, str]] = ()
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
    """Return a part of a section for the template; a figure is also written as a picture."""
    if isinstance(part, Table):
        return {"part": part}
    figure = part.chart.draw()
    write_over(folder / f"{part.name}.png", image(figure, "png"))
    drawn = base64.b64encode(image(figure, "svg")).decode()
    return {"part": part, "picture": f"data:image/svg+xml;base64,{drawn}"}
