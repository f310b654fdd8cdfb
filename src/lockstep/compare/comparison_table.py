"""The rows of a comparison in words, as tables; and all that is printed of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from lockstep.compare.advice import all_cores, best_of, sentence, unsteady
from lockstep.compare.result import Comparison, Row
from lockstep.errors import counted
from lockstep.report.table import Table
from lockstep.tensors.byte_size import size

SPEED = ("samples/s", "lowest, highest", "x one", "x cores", "effic.", "memory")
"""The columns of speed and memory."""

_RATIOS = {
    "x one": "speed_up",
    "x cores": "against_all_cores",
}
"""The columns of ratios, and the figures of a row that they show."""

START = ("start", "parity")
"""The columns of the second table of a terminal."""

_OF_CORES = (
    "; memory: of a process. CPU devices are cores of one machine; speed-ups on GPUs may be larger "
    "or smaller"
)

_NOT_REACHED = {
    "epoch",
    "step",
    "lr",
    "seconds",
    "samples_per_second",
    "loss",
    "grad_norm",
}
"""What the record of an epoch has beside losses and metrics."""


def one_device(found: Comparison) -> str:
    """Return what ratios are taken to."""
    if found.on_slots:
        return "one CPU device"
    return "one device"


def explained(found: Comparison) -> str:
    """Return what the ratios are."""
    text = f"x one: times {one_device(found)}"
    if found.on_slots:
        text += f"; x cores: times {all_cores(found)} without a strategy"
    return text


Cells = dict[str, dict[str, str]]
"""By the name of a row, its cells by column; what isn't known is left out."""


def table(cells: Cells, columns: Iterable[str], title: str = "", caption: str = "") -> Table:
    """Return a table of these columns, without those that are empty.

    Args:
        cells: of all rows.
        columns: in their order; a row may have others too.
        title: what it shows.
        caption: what should be known to read it.
    """
    known = set().union(*cells.values())
    head = [column for column in columns if column in known]
    rows = []
    for row_name, row in cells.items():
        words = [row.get(column, "") for column in head]
        rows.append([row_name, *words])
    return Table(["", *head], rows, title, caption)


def cells_of(found: Comparison) -> Cells:
    """Return what was measured, in words."""
    return {row.name: _cells(found, row) for row in found.measured}


def _cells(found: Comparison, row: Row) -> dict[str, str]:
    """Return the cells of a row that was measured, by column."""
    lowest, highest = row.timing.spread
    cells = {
        "samples/s": _rate(row.timing.median),
        "lowest, highest": f"{_rate(lowest)}, {_rate(highest)}",
        "memory": _memory(row),
        "start": f"{row.started:.1f} s",
        "devices": row.where,
    }
    figures = found.figures(row)
    for head, name in _RATIOS.items():
        if name in figures:
            cells[head] = f"{figures[name]:.2f}"
    if len(row.devices) > 1 and "efficiency" in figures:
        cells["effic."] = f"{100 * figures['efficiency']:.0f} %"
    if row.agreement is not None:
        cells["parity"] = str(row.agreement)
    return cells


def _memory(row: Row) -> str:
    """Return ``391 MiB``, ``2 x 391 MiB``: the largest, and how many there are."""
    largest = size(max(row.peaks))
    count = len(row.peaks)
    if count == 1:
        return largest
    return f"{count} x {largest}"


def _rate(value: float) -> str:
    """Return ``10,230``, ``45.2``: four digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def reached(found: Comparison) -> Table:
    """Return, with ``epochs``, the losses and the metrics that were reached."""
    cells = {}
    columns = {"epochs": None}
    for row in found.measured:
        if row.history:
            last = row.history[-1]
            words = {"epochs": str(last["epoch"])}
            for name, value in last.items():
                if name not in _NOT_REACHED and value is not None:
                    words[name] = f"{value:.4g}"
            cells[row.name] = words
            columns |= dict.fromkeys(words)
    return table(cells, columns, "Reached")


def lines_of(found: Comparison, width: int = 80) -> list[str]:
    """Return all that is printed at the end.

    Args:
        found: the comparison.
        width: of the terminal, in columns.
    """
    turns = f"a turn of {found.seconds:g} s"
    if found.rounds > 1:
        turns = f"{found.rounds} turns of {found.seconds:g} s or more"
    lines = _wrapped(
        [
            f"{found.job}: batches of {batches_of(found)}, on {_where(found)}",
            f"each in fresh processes, {turns}, one after the other; the median of them",
            "",
        ],
        width,
    )

    cells = cells_of(found)
    if cells:
        lines += table(cells, SPEED).lines(width)
    lines += _failed(found, width)
    if cells:
        below = explained(found)
        if found.on_slots:
            below += _OF_CORES
        lines += _wrapped([below], width)
        lines.append("")
        lines += table(cells, START).lines(width)
    lines += _wrapped([*plans_of(found), *caveats_of(found)], width)

    outcome = reached(found)
    if outcome.rows:
        lines.append("")
        lines += outcome.lines(width)
    for text in (unsteady(found), sentence(found)):
        if text:
            lines.append("")
            lines += _wrapped([text], width)
    best = best_of(found)
    if best is not None:
        lines.append(f"  {best.line}")
    return lines


def _failed(found: Comparison, width: int) -> list[str]:
    """Return why strategies could not be measured."""
    lines = []
    for row in found.rows:
        if not row.rates:
            lines.append(row.name)
            lines += _wrapped([row.reason], width, "    ")
    return lines


def _where(found: Comparison) -> str:
    """Return the devices of the strategies, or of ``single`` where there are none."""
    places = []
    for row in found.rows:
        if row.role == "strategy":
            places.append(row.where)
    one = found.rows[0].one
    places.append(found[one].where)
    return max(places, key=len)


def batches_of(found: Comparison) -> str:
    """Return ``64 samples``; ``32 or 64 samples`` where a sweep has several."""
    sizes = list(dict.fromkeys(map(found.samples_of, found.rows)))
    if len(sizes) == 1:
        return counted(sizes[0], "sample")
    *others, last = [f"{size:,}" for size in sizes]
    return f"{', '.join(others)} or {last} samples"


def caveats_of(found: Comparison) -> list[str]:
    """Return where numbers are not those of one device: a line for each caveat, with the rows."""
    return _with_names({row.name: row.caveats for row in found.measured})


def plans_of(found: Comparison) -> list[str]:
    """Return what was chosen for the rows: a line for each plan, with the rows."""
    return _with_names({row.name: row.plans for row in found.measured})


def _with_names(texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each text once, behind the names of the rows that have it.

    Args:
        texts: by the name of a row.
    """
    names: dict[str, list[str]] = {}
    for name, lines in texts.items():
        for line in dict.fromkeys(lines):
            names.setdefault(line, []).append(name)
    return [f"{', '.join(rows)}: {line}" for line, rows in names.items()]


def _wrapped(texts: Sequence[str], width: int, indent: str = "") -> list[str]:
    """Break texts into lines.

    Args:
        texts: each begins a line; one that is empty is an empty line.
        width: of the terminal, in columns.
        indent: what each line begins with.
    """
    lines = []
    for text in texts:
        broken = textwrap.wrap(
            text,
            max(20, width),
            initial_indent=indent,
            subsequent_indent=indent,
        )
        lines += broken or [""]
    return lines
