"""The rows of a comparison as tables: for a terminal, as CSV, and as cells for a page."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.compare.advice import all_cores, best_of, sentence, unsteady
from lockstep.compare.result import Comparison, Row, median_of
from lockstep.errors import counted
from lockstep.profiling.time_breakdown import KINDS
from lockstep.tensors.byte_size import size
from lockstep.training.records.batch_shapes import written

_NAME = 22
"""Columns of a terminal for the names of the rows, where there is room."""

_LEAST = 4
"""Columns for a name in a narrow terminal, which then has a line of its own."""

_NOT_REACHED = {
    "epoch",
    "step",
    "lr",
    "seconds",
    "samples_per_second",
    "tokens_per_second",
    "loss",
    "grad_norm",
}
"""What the record of an epoch has beside losses and metrics."""

_CSV = (
    "name",
    "strategy",
    "devices",
    "settings",
    "samples_per_second",
    "lowest",
    "highest",
    "speed_up",
    "against_all_cores",
    "efficiency",
    "largest_memory_bytes",
    "memory_bytes",
    "start_seconds",
    *KINDS,
    "moved_bytes",
    "parity",
    "difference",
)
"""The columns of a CSV file before those of losses and metrics."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its name.
        cell: gives the words for a row.
        width: in a terminal.
        title: its name on a page, where that is longer.
    """

    head: str
    cell: Callable[[Row], str]
    width: int
    title: str = ""


def speed_columns(found: Comparison) -> list[Column]:
    """Return the columns of speed and memory."""

    def speed_up(row: Row) -> str:
        return _ratio(median_of(found.speed_up(row)))

    def against_cores(row: Row) -> str:
        return _ratio(median_of(found.against_cores(row)))

    def efficiency(row: Row) -> str:
        return "" if len(row.devices) == 1 else _percent(found.efficiency(row))

    columns = [
        Column("samples/s", lambda row: _rate(row.timing.median), 10),
        Column("lowest, highest", lambda row: ", ".join(map(_rate, row.timing.spread)), 16),
        Column("x one", speed_up, 7, f"times {one_device(found)}"),
    ]
    if found.on_slots:
        columns.append(Column("x cores", against_cores, 8, f"times {all_cores(found)}"))
    columns.append(Column("effic.", efficiency, 7, "efficiency"))
    columns.append(Column("memory", _memory, 13))
    return columns


def one_device(found: Comparison) -> str:
    """Return what ratios are taken to."""
    return "one CPU device" if found.on_slots else "one device"


def _memory(row: Row) -> str:
    """Return ``391 MiB``, ``2 x 391 MiB``: the largest, and how many there are."""
    if not row.peaks:
        return ""
    largest = size(max(row.peaks))
    return largest if len(row.peaks) == 1 else f"{len(row.peaks)} x {largest}"


def _moved(row: Row) -> str:
    """Return ``591 KiB``, "" where it isn't known."""
    if row.observed is None or row.observed.moved is None or len(row.devices) == 1:
        return ""
    return size(row.observed.moved)


def _parity(row: Row) -> str:
    return "" if row.agreement is None else str(row.agreement)


MOVED = Column("moved", _moved, 10)
START = Column("start", lambda row: f"{row.started:.1f} s", 7)


def time_columns() -> list[Column]:
    """Return the columns of where the time of a step goes, what moves, and the numbers."""

    def share(kind: str) -> Callable[[Row], str]:
        return lambda row: _percent(row.shares.get(kind))

    return [
        Column("comp.", share("computing"), 6),
        Column("comm.", share("communicating"), 6),
        Column("wait", share("waiting"), 5),
        Column("load", share("loading"), 5),
        Column("other", share("other"), 6),
        MOVED,
        START,
        Column("parity", _parity, 15),
    ]


def outcome_columns(found: Comparison) -> list[Column]:
    """Return, with ``epochs``, the columns of the loss and the metrics reached."""
    names: dict[str, None] = {}
    for row in found.rows:
        if row.history:
            names |= dict.fromkeys(row.history[-1])

    def last(name: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            value = row.history[-1].get(name) if row.history else None
            return "" if value is None else f"{value:.4g}"

        return cell

    return [
        Column(name, last(name), max(10, len(name) + 2))
        for name in names
        if name not in _NOT_REACHED
    ]


def _rate(value: float) -> str:
    """Return ``10,230``, ``45.2``: four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"


def lines_of(found: Comparison, width: int = 80) -> list[str]:
    """Return all that is printed at the end."""
    measured = found.measured
    lines = _wrapped(f"{found.job}: batches of {batches_of(found)}, on {_where(found)}", width)
    turns = f"a turn of {found.seconds:g} s"
    if found.rounds > 1:
        turns = f"{found.rounds} turns of {found.seconds:g} s or more"
    lines += _wrapped(
        f"each in fresh processes, {turns}, one after the other; the median of them", width
    )
    lines += ["", *_table(found.rows, speed_columns(found), width)]
    if found.on_slots and measured:
        lines += _wrapped(
            f"x one: times one CPU device; x cores: times {all_cores(found)} without a strategy; "
            "memory: of a process. CPU devices are cores of one machine, not GPUs: what gains here "
            "may gain more or less there",
            width,
        )
    if measured:
        lines += ["", *_table(measured, time_columns(), width)]
        lines += _wrapped(
            "moved: what a device gives to the others in a step, where that is known", width
        )
        lines += _sizes(found, width)
    for line in (*plans_of(found), *caveats_of(found)):
        lines += _wrapped(line, width)
    trained = [row for row in measured if row.history]
    if trained:
        lines += ["", *_table(trained, outcome_columns(found), width)]
    for text in (unsteady(found), sentence(found)):
        if text:
            lines += ["", *_wrapped(text, width)]
    best = best_of(found)
    if best is not None and best.line:
        lines.append(f"  {best.line}")
    return lines


def _where(found: Comparison) -> str:
    """Return the devices of the strategies, or of ``single`` where there are none."""
    places = [row.where for row in found.rows if row.role == "strategy"]
    places.append(found[found.rows[0].one].where)
    return max(places, key=len)


def batches_of(found: Comparison) -> str:
    """Return ``64 samples``; ``32 or 64 samples`` where a sweep has several."""
    sizes = list(dict.fromkeys(map(found.samples_of, found.rows)))
    if len(sizes) == 1:
        return counted(sizes[0], "sample")
    *others, last = [f"{size:,}" for size in sizes]
    return f"{', '.join(others)} or {last} samples"


def _sizes(found: Comparison, width: int) -> list[str]:
    """Return the inputs and outputs of a device, a line for each size: ``dp, ddp: 32 x 8 -> 32 x
    10``.
    """
    sizes: dict[str, list[str]] = {}
    for row in found.measured:
        if row.observed is None:
            continue
        for one in row.observed.devices:
            if one.inputs:
                sizes.setdefault(row.name, [])
                sizes[row.name].append(f"{written(one.inputs)} -> {written(one.outputs)}")
    if not sizes:
        return []
    lines = ["", *_wrapped("what a device is given at once, and gives:", width)]
    for line in _with_names(sizes):
        lines += _wrapped(line, width, "  ")
    return lines


def caveats_of(found: Comparison) -> list[str]:
    """Return where numbers are not those of one device: a line for each caveat, with the rows."""
    return _with_names({row.name: row.caveats for row in found.measured})


def plans_of(found: Comparison) -> list[str]:
    """Return what was chosen for the rows: a line for each plan, with the rows."""
    return _with_names({row.name: row.plans for row in found.measured})


def _with_names(texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each text once, behind the names of the rows that have it."""
    names: dict[str, list[str]] = {}
    for name, lines in texts.items():
        for line in dict.fromkeys(lines):
            names.setdefault(line, []).append(name)
    return [f"{', '.join(rows)}: {line}" for line, rows in names.items()]


def _table(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[str]:
    """Return a line for each row; a name that is too long has a line of its own."""
    longest = max(len(row.name) for row in rows) + 1
    room = width - sum(column.width for column in columns)
    beside = max(_LEAST, min(room, max(longest, _NAME)))
    lines = []
    if any(row.rates for row in rows):
        heads = [f"{column.head:>{column.width}}" for column in columns]
        lines.append(" " * beside + "".join(heads))
    for row in rows:
        name = row.name
        if not row.rates:
            lines += [name, *_wrapped(row.reason, width, "    ")]
            continue
        if len(name) >= beside:
            lines.append(name)
            name = ""
        cells = [f"{column.cell(row):>{column.width}}" for column in columns]
        lines.append(f"{name:<{beside}}{''.join(cells)}".rstrip())
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    width = max(20, width)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent) or [""]


def csv_of(found: Comparison) -> str:
    """Return a line for each row, with plain numbers; what failed has its reason."""
    outcome = [column.head for column in outcome_columns(found)]
    columns = [*_CSV, *outcome, "reason"]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, values in zip(found.rows, found.as_dict()["rows"], strict=True):
        reached = row.history[-1] if row.history else {}
        writer.writerow({**reached, **values, **_csv_cells(row)})
    return out.getvalue()


def _csv_cells(row: Row) -> dict[str, object]:
    """Return the cells of a row that ``Comparison.as_dict`` has in another form."""
    settings = [f"{key}={value}" for key, value in row.settings.items()]
    cells: dict[str, object] = {"devices": row.where, "settings": " ".join(settings)}
    cells["start_seconds"] = row.started
    cells |= row.shares
    if row.rates:
        cells["lowest"], cells["highest"] = row.timing.spread
        cells["largest_memory_bytes"] = max(row.peaks)
        cells["memory_bytes"] = sum(row.peaks)
    if row.observed is not None:
        cells["moved_bytes"] = row.observed.moved
    if row.agreement is not None:
        cells["parity"] = row.agreement.word
        cells["difference"] = row.agreement.difference
    return cells
