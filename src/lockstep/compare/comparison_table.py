"""The rows of a comparison as tables: for a terminal of any width, as CSV, and as cells for a
page.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lockstep.compare.advice import all_cores, best_of, cautions, sentence
from lockstep.compare.result import Comparison, Row
from lockstep.compare.timing import Timing
from lockstep.errors import counted
from lockstep.profiling.time_breakdown import KINDS
from lockstep.tensors.byte_size import size
from lockstep.training.batch_shapes import written

_BESIDE, _LEAST = 22, 4
"""Columns that names get beside the numbers, where there is room; with less than the least there
is no table.
"""


class Column(NamedTuple):
    """A column of a table: its name, the words for a row, how wide it is in a terminal, its name
    on a page.
    """

    head: str
    cell: Callable[[Row], str]
    width: int
    title: str = ""


def speed_columns(found: Comparison) -> list[Column]:
    """How fast, and at what cost."""

    def ratio(timing: Timing | None) -> str:
        return "" if timing is None else f"{timing.median:.2f}"

    cores = Column(
        "x cores", lambda row: ratio(found.against_cores(row)), 8, f"times {all_cores(found)}"
    )
    return [
        Column("samples/s", lambda row: _rate(row.timing.median), 10),
        Column("lowest, highest", lambda row: ", ".join(map(_rate, row.timing.spread)), 16),
        Column("x one", lambda row: ratio(found.speed_up(row)), 7, f"times {one_device(found)}"),
        *([cores] if found.on_slots else []),
        Column(
            "effic.",
            lambda row: _percent(found.efficiency(row)) if len(row.devices) > 1 else "",
            7,
            "efficiency",
        ),
        Column("memory", _memory, 13),
    ]


def one_device(found: Comparison) -> str:
    """What ratios are taken to."""
    return "one CPU device" if found.on_slots else "one device"


MOVED = Column("moved", lambda row: _moved(row), 10)
START = Column("start", lambda row: f"{row.started:.1f} s", 7)


def time_columns() -> list[Column]:
    """Where the time of a step goes, what moves, the numbers."""

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
        Column("parity", lambda row: "" if row.agreement is None else str(row.agreement), 15),
    ]


def outcome_columns(found: Comparison) -> list[Column]:
    """With ``epochs``: the loss and the metrics reached; empty without."""
    names = [
        n
        for row in found.rows
        for n in (row.history[-1] if row.history else {})
        if n not in _NOT_REACHED
    ]

    def last(name: str) -> Callable[[Row], str]:
        return lambda row: (
            f"{row.history[-1][name]:.4g}" if row.history and name in row.history[-1] else ""
        )

    return [Column(name, last(name), max(10, len(name) + 2)) for name in dict.fromkeys(names)]


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


def _rate(value: float) -> str:
    """``10,230``, ``45.2``: four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"


def _memory(row: Row) -> str:
    """``391 MiB``, ``2 x 391 MiB``: the largest, and how many there are."""
    if not row.peaks:
        return ""
    return (
        f"{len(row.peaks)} x {size(max(row.peaks))}" if len(row.peaks) > 1 else size(row.peaks[0])
    )


def _moved(row: Row) -> str:
    """``591 KiB``, "" where it isn't known."""
    known = None if row.glance is None else row.glance.moved
    return "" if known is None or len(row.devices) == 1 else size(known)


def lines_of(found: Comparison, width: int = 80) -> list[str]:
    """All that is printed at the end."""
    first = next(row for row in found.rows if row.name == row.one)
    devices = max(
        (row.where for row in found.rows if row.role == "strategy"), default=first.where, key=len
    )
    several = f"{found.rounds} turns of {found.seconds:g} s or more"
    turns = several if found.rounds > 1 else f"a turn of {found.seconds:g} s"
    lines = _wrapped(f"{found.job}: batches of {batches_of(found)}, on {devices}", width)
    lines += _wrapped(
        f"each in fresh processes, {turns}, one after the other; the median of them", width
    )
    lines += ["", *_table(found.rows, speed_columns(found), width)]
    measured = found.measured
    if found.on_slots and measured:
        lines += _wrapped(
            f"x one: times one CPU device; x cores: times {all_cores(found)} without a strategy; "
            "memory: of a process. "
            "CPU devices are cores of one machine, not GPUs: what gains here may gain more or "
            "less there",
            width,
        )
    if measured:
        lines += ["", *_table(measured, time_columns(), width)]
        lines += _wrapped(
            "moved: what a device gives to the others in a step, where that is known", width
        )
    if sizes := _sizes(found):
        lines += ["", *_wrapped("what a device is given at once, and gives:", width)]
        lines += [one for line in sizes for one in _wrapped(line, width, "  ")]
    for line in (*plans_of(found), *caveats_of(found)):
        lines += _wrapped(line, width)
    if outcome := outcome_columns(found):
        lines += ["", *_table([row for row in measured if row.history], outcome, width)]
    for said in (*cautions(found), sentence(found)):
        lines += ["", *_wrapped(said, width)]
    best = best_of(found)
    return [*lines, f"  {best.line}"] if best is not None and best.line else lines


def batches_of(found: Comparison) -> str:
    """``64 samples``; ``32 or 64 samples`` where a sweep has several."""
    sizes = list(dict.fromkeys(map(found.samples_of, found.rows)))
    *others, last = [f"{size:,}" for size in sizes]
    return f"{', '.join(others)} or {last} samples" if others else counted(sizes[0], "sample")


def _sizes(found: Comparison) -> list[str]:
    """``dp, ddp: 32 x 8 -> 32 x 10``: what a device is given at once, and what it makes of it; a
    line for each size.
    """
    groups: dict[str, list[str]] = {}
    for row in found.measured:
        seen = () if row.glance is None else row.glance.devices
        every = dict.fromkeys(
            f"{written(one.inputs)} -> {written(one.outputs)}" for one in seen if one.inputs
        )
        if every:
            groups.setdefault(" and ".join(every), []).append(row.name)
    return [f"{', '.join(names)}: {sizes}" for sizes, names in groups.items()]


def caveats_of(found: Comparison) -> list[str]:
    """Where numbers are not those of one device, as the strategies say themselves: a line for
    each, with the rows.
    """
    return _with_names({row.name: row.caveats for row in found.measured})


def plans_of(found: Comparison) -> list[str]:
    """What was chosen for a row: a line for each, with the rows."""
    return _with_names({row.name: row.plans for row in found.measured})


def _with_names(said: Mapping[str, Sequence[str]]) -> list[str]:
    every = dict.fromkeys(line for lines in said.values() for line in lines)
    return [
        f"{', '.join(name for name, lines in said.items() if line in lines)}: {line}"
        for line in every
    ]


def _table(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[str]:
    """A line for each row; a name that is too long has one of its own, and in a narrow terminal
    each cell has.
    """
    longest = max((len(row.name) for row in rows), default=0) + 1
    beside = min(max(longest, _BESIDE), width - sum(column.width for column in columns))
    lines = []
    if beside >= _LEAST and any(row.rates for row in rows):
        lines.append(" " * beside + "".join(f"{column.head:>{column.width}}" for column in columns))
    for row in rows:
        if not row.rates:
            lines += [row.name, *_wrapped(row.reason, width, "    ")]
        elif beside < _LEAST:
            told = [
                f"    {column.head:<18} {column.cell(row)}"
                for column in columns
                if column.cell(row)
            ]
            lines += [row.name, *told]
        else:
            name = row.name
            if len(name) >= beside:
                lines.append(name)
                name = ""
            cells = "".join(f"{column.cell(row):>{column.width}}" for column in columns)
            lines.append(f"{name:<{beside}}{cells}".rstrip())
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, max(20, width), initial_indent=indent, subsequent_indent=indent) or [
        ""
    ]


def csv_of(found: Comparison) -> str:
    """A line for each row, plain numbers; what failed has its reason."""
    first = (
        "name",
        "strategy",
        "devices",
        "settings",
        "samples_per_second",
        "lowest",
        "highest",
        "speed_up",
    )
    more = (
        "against_all_cores",
        "efficiency",
        "largest_memory_bytes",
        "memory_bytes",
        "start_seconds",
    )
    outcome = [column.head for column in outcome_columns(found)]
    out = io.StringIO()
    writer = csv.DictWriter(
        out,
        [*first, *more, *KINDS, "moved_bytes", "parity", "difference", *outcome, "reason"],
        extrasaction="ignore",
        lineterminator="\n",
    )
    writer.writeheader()
    for row, values in zip(found.rows, found.as_dict()["rows"], strict=True):
        lowest, highest = row.timing.spread if row.rates else (None, None)
        reached = row.history[-1] if row.history else {}
        its: dict[str, object] = {
            "devices": row.where,
            "settings": " ".join(f"{key}={value}" for key, value in row.settings.items()),
            "lowest": lowest,
            "highest": highest,
            "largest_memory_bytes": max(row.peaks, default=None),
            "memory_bytes": sum(row.peaks) if row.rates else None,
            "start_seconds": row.started,
            "moved_bytes": None if row.glance is None else row.glance.moved,
        }
        if row.agreement is not None:
            its |= {"parity": row.agreement.word, "difference": row.agreement.difference}
        writer.writerow({**reached, **values, **row.shares, **its})
    return out.getvalue()
