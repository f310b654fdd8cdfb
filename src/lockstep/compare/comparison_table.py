"""The rows of a comparison as tables: for a terminal of any width, as CSV, and as cells for a page."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.compare.advice import all_cores, best_of, cautions, sentence
from lockstep.compare.result import Comparison, Row
from lockstep.errors import counted
from lockstep.training.first_step import written

_NARROW = 22
"""Columns that names get beside the numbers, where the terminal is no wider."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its name.
        cell: the words for a row.
        width: of the column in a terminal.
    """

    head: str
    cell: Callable[[Row], str]
    width: int


def speed_columns(found: Comparison) -> list[Column]:
    """How fast, and at what cost."""

    def ratio(timing: object) -> str:
        return "" if timing is None else f"{timing.median:.2f}"  # type: ignore[attr-defined]

    columns = [
        Column("samples/s", lambda row: rate(row.timing.median), 10),
        Column("lowest, highest", lambda row: ", ".join(rate(r) for r in row.timing.spread), 16),
        Column("x slot" if found.on_slots else "x one", lambda row: ratio(found.speed_up(row)), 7),
    ]
    if found.on_slots:
        columns.append(Column("x cores", lambda row: ratio(found.against_cores(row)), 8))
    return [
        *columns,
        Column("effic.", lambda row: percent(found.efficiency(row)) if len(row.devices) > 1 else "", 7),
        Column("memory", memory, 13),
    ]


def time_columns(found: Comparison) -> list[Column]:
    """Where the time of a step goes, what moves, the numbers."""

    def share(kind: str) -> Callable[[Row], str]:
        return lambda row: percent(row.shares.get(kind))

    return [
        Column("comp.", share("computing"), 6),
        Column("comm.", share("communicating"), 6),
        Column("wait", share("waiting"), 5),
        Column("load", share("loading"), 5),
        Column("other", share("other"), 6),
        Column("moved", moved, 10),
        Column("start", lambda row: f"{row.started:.1f} s", 7),
        Column("parity", parity, 15),
    ]


def outcome_columns(found: Comparison) -> list[Column]:
    """With ``epochs``: the loss and the metrics reached; empty without."""
    names = [n for row in found.rows for n in (row.history[-1] if row.history else {}) if n not in _NOT_REACHED]

    def last(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row.history[-1][name]:.4g}" if row.history and name in row.history[-1] else ""

    return [Column(name, last(name), max(10, len(name) + 2)) for name in dict.fromkeys(names)]


_NOT_REACHED = {"epoch", "step", "lr", "seconds", "samples_per_second"}


def rate(value: float) -> str:
    """``10,230``, ``45.2``: four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(part: float | None) -> str:
    """``93 %``; "" for None."""
    return "" if part is None else f"{100 * part:.0f} %"


def size(count: int) -> str:
    """``391 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count} B"


def memory(row: Row) -> str:
    """``391 MiB``, ``2 x 391 MiB``: the largest, and how many there are."""
    if not row.peaks:
        return ""
    return f"{len(row.peaks)} x {size(max(row.peaks))}" if len(row.peaks) > 1 else size(row.peaks[0])


def moved(row: Row) -> str:
    """``591 KiB``, "" where it isn't known."""
    known = None if row.glance is None else row.glance.moved
    return "" if known is None or len(row.devices) == 1 else size(known)


def parity(row: Row) -> str:
    """``equal 6e-16``."""
    return "" if row.agreement is None else str(row.agreement)


def lines_of(found: Comparison, width: int = 80) -> list[str]:
    """All that is printed at the end."""
    first = next(row for row in found.rows if row.name == row.one)
    devices = max((row.where for row in found.rows if row.role == "strategy"), default=first.where, key=len)
    lines = _wrapped(f"{found.job}: batches of {batches_of(found)}, on {devices}", width)
    turns = (
        f"{found.rounds} turns of {found.seconds:g} s or more" if found.rounds > 1 else f"a turn of {found.seconds:g} s"
    )
    lines += _wrapped(f"each in fresh processes, {turns}, one after the other; the median of them", width)
    lines += ["", *_table(found.rows, speed_columns(found), width, reasons=True)]
    if found.on_slots and found.measured:
        lines += _wrapped(
            f"x slot: times one slot; x cores: times {all_cores(found)} without a strategy; memory: of a process. "
            "Slots are cores of one machine, not GPUs: what gains here may gain more or less there",
            width,
        )
    measured = found.measured
    if measured:
        lines += ["", *_table(measured, time_columns(found), width)]
        lines += _wrapped("moved: what a device gives to the others in a step, where that is known", width)
    if sizes := sizes_of(found):
        lines += ["", *_wrapped("what a device is given at once, and gives:", width)]
        lines += [one for line in sizes for one in _wrapped(line, width, "  ")]
    for line in (*plans_of(found), *caveats_of(found)):
        lines += _wrapped(line, width)
    outcome = outcome_columns(found)
    if outcome:
        lines += ["", *_table([row for row in measured if row.history], outcome, width)]
    for warning in cautions(found):
        lines += ["", *_wrapped(warning, width)]
    lines += ["", *_wrapped(sentence(found), width)]
    best = best_of(found)
    return [*lines, f"  {best.line}"] if best is not None and best.line else lines


def batches_of(found: Comparison) -> str:
    """``64 samples``; ``32 or 64 samples`` where a sweep has several."""
    sizes = list(dict.fromkeys(map(found.samples_of, found.rows)))
    *others, last = [f"{size:,}" for size in sizes]
    return f"{', '.join(others)} or {last} samples" if others else counted(sizes[0], "sample")


def sizes_of(found: Comparison) -> list[str]:
    """``dp, ddp: 32 x 8 -> 32 x 10``: what a device is given at once, and what it makes of it; a line for each size."""
    groups: dict[str, list[str]] = {}
    for row in found.measured:
        seen = () if row.glance is None else row.glance.devices
        every = dict.fromkeys(f"{written(one.inputs)} -> {written(one.outputs)}" for one in seen if one.inputs)
        if every:
            groups.setdefault(" and ".join(every), []).append(row.name)
    return [f"{', '.join(names)}: {sizes}" for sizes, names in groups.items()]


def caveats_of(found: Comparison) -> list[str]:
    """Where numbers are not those of one device, as the strategies say themselves: a line for each, with the rows."""
    return _with_names({row.name: row.caveats for row in found.measured})


def plans_of(found: Comparison) -> list[str]:
    """What was chosen for a row: a line for each, with the rows."""
    return _with_names({row.name: row.plans for row in found.measured})


def _with_names(said: Mapping[str, Sequence[str]]) -> list[str]:
    every = dict.fromkeys(line for lines in said.values() for line in lines)
    return [f"{', '.join(name for name, lines in said.items() if line in lines)}: {line}" for line in every]


def _table(rows: Sequence[Row], columns: Sequence[Column], width: int, *, reasons: bool = False) -> list[str]:
    names = max([len(row.name) for row in rows], default=0) + 1
    taken = sum(column.width for column in columns)
    beside = max(names, min(_NARROW, width - taken))  # a longer name has a line of its own
    if beside + taken > width:
        beside = max(4, min(_NARROW, width - taken))
    if beside + taken > width or beside < 4:
        return _list(rows, columns, width, reasons=reasons)
    lines = []
    if any(row.rates for row in rows):
        lines.append(" " * beside + "".join(f"{column.head:>{column.width}}" for column in columns))
    for row in rows:
        head = f"{row.name:<{beside}}"
        if len(row.name) >= beside:
            lines.append(row.name)
            head = " " * beside
        if not row.rates:
            lines += [head.rstrip()] if head.strip() else []
            lines += _wrapped(row.reason, width, "    ") if reasons else []
            continue
        lines.append((head + "".join(f"{column.cell(row):>{column.width}}" for column in columns)).rstrip())
    return lines


def _list(rows: Sequence[Row], columns: Sequence[Column], width: int, *, reasons: bool) -> list[str]:
    """For a terminal that is too narrow for the table."""
    lines = []
    for row in rows:
        lines.append(row.name)
        if not row.rates:
            lines += _wrapped(row.reason, width, "    ") if reasons else []
            continue
        lines += [f"    {column.head:<18} {column.cell(row)}".rstrip() for column in columns if column.cell(row)]
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, max(20, width), initial_indent=indent, subsequent_indent=indent) or [""]


def csv_of(found: Comparison) -> str:
    """A line for each row, plain numbers; what failed has its reason."""
    out = io.StringIO()
    kinds = ("computing", "communicating", "waiting", "loading", "other")
    outcome = [column.head for column in outcome_columns(found)]
    writer = csv.writer(out, lineterminator="\n")
    first = ("name", "strategy", "devices", "settings", "samples_per_second", "lowest", "highest", "speed_up")
    more = ("against_all_cores", "efficiency", "largest_memory_bytes", "memory_bytes", "start_seconds")
    writer.writerow([*first, *more, *kinds, "moved_bytes", "parity", "difference", *outcome, "reason"])
    for row in found.rows:
        speed_up, cores = found.speed_up(row), found.against_cores(row)
        rates = [row.timing.median, *row.timing.spread] if row.rates else [None] * 3
        agreement, glance = row.agreement, row.glance
        values: list[object] = [row.name, row.strategy, row.where]
        values += [" ".join(f"{key}={value}" for key, value in row.settings.items()), *rates]
        values += [None if one is None else one.median for one in (speed_up, cores)]
        values += [found.efficiency(row), max(row.peaks, default=None), sum(row.peaks) if row.rates else None]
        values += [row.started if row.rates else None, *(row.shares.get(kind) for kind in kinds)]
        values += [None if glance is None else glance.moved]
        values += [None, None] if agreement is None else [_EQUAL[agreement.equal], agreement.difference]
        values += [row.history[-1].get(name) if row.history else None for name in outcome]
        writer.writerow(["" if value is None else value for value in [*values, row.reason]])
    return out.getvalue()


_EQUAL = {True: "equal", False: "differs", None: "not known"}
