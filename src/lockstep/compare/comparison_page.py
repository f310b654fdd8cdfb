"""The report of a comparison, as a page.

A sweep is a figure of the speed-up of each strategy over the values that were tried, beside what
has no such setting::

    --sweep microbatches=1,2,4,8       pp     a line through its four rows
                                       mp     a level: one row for all values
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.compare.advice import best_of, cautions, sentence
from lockstep.compare.comparison_table import (
    MOVED,
    START,
    batches_of,
    caveats_of,
    one_device,
    outcome_columns,
    plans_of,
    speed_columns,
)
from lockstep.compare.result import Comparison, Row
from lockstep.compare.timing import Timing
from lockstep.errors import counted
from lockstep.report.charts import Bars, Lines, Stacks
from lockstep.report.page import Figure, Page, Section, Table, write
from lockstep.report.timeline_charts import turns_of
from lockstep.training.batch_shapes import written

_IDS = 4
"""Sample ids that are shown of a device."""

_AXES = {
    "microbatches": "micro-batches",
    "split_size": "samples of a micro-batch, at most",
    "batch_size": "samples of a global batch",
}
"""What the axis of a sweep is called where the setting's own name says too little."""


def write_page(found: Comparison) -> Path:
    """Write the report of a comparison into its folder.

    Raises:
        InputError: what a report needs isn't installed.
        FolderError: it can't be written.
    """
    return write(page_of(found), Path(found.folder))


def page_of(found: Comparison) -> Page:
    """All that was found, in the order in which a person asks."""
    notes = [
        f"Batches of {batches_of(found)}; each way in fresh processes, "
        f"{counted(found.rounds, 'turn')} of "
        f"{found.seconds:g} s or more in alternation; bars show the median turn, and the lines on "
        "them the lowest and "
        "the highest."
    ]
    if found.on_slots:
        notes.append(
            "The devices are CPU devices: cores of one machine, which share its memory and "
            "caches. They are not GPUs: "
            "what gains here may gain more or less there."
        )
    best = best_of(found)
    return Page(
        title=f"{Path(found.job).name}: strategies side by side",
        verdict=sentence(found),
        notes=[*notes, *cautions(found)],
        sections=[section for section in _sections(found) if section.parts or section.text],
        facts=[(name, str(value)) for name, value in found.machine.items()],
        command=found.command,
        advice="" if best is None else best.line,
    )


def _sections(found: Comparison) -> Iterator[Section]:
    rows = found.measured
    if rows:
        yield Section("How fast", [_speed(found), *sweeps_of(found), _overview(found)])
    failed = [[row.name, row.reason] for row in found.rows if not row.rates]
    if failed:
        yield Section(
            "What could not be measured", [Table("failed", "And why", ["", "reason"], failed)]
        )
    if rows:
        yield Section("Memory", [_memory(found)])
        yield _time(found)
        yield Section("Who computes when", list(_turns(found)), plans_of(found))
        yield from _losses(found)
    yield _numbers(found)
    if rows:
        yield Section("What each device sees of a batch", [_seen(found)])


def _speed(found: Comparison) -> Figure:
    rows = found.measured
    ratios = [None if row.name == row.one else found.speed_up(row) for row in rows]
    chart = Bars(
        "samples per second",
        [row.name for row in rows],
        [row.timing.median for row in rows],
        [row.timing.spread for row in rows],
        [row.strategy for row in rows],
        ["" if ratio is None else f"{ratio.median:.2f} x" for ratio in ratios],
    )
    return Figure(
        "speed", "Samples per second", chart, f"Longer is faster; x: times {one_device(found)}."
    )


def sweeps_of(found: Comparison) -> Iterator[Figure]:
    """Yield a figure for each setting that some strategy was measured with several numbers of.

    A line is named by its rows without that setting. A row without it is a level line.
    """
    ratios = {}
    numbers = {}
    for row in found.measured:
        ratio = found.speed_up(row)
        if row.role != "one device" and ratio is not None:
            ratios[row.name] = ratio
            numbers[row.name] = _numbers_of(row)

    for key in dict.fromkeys(key for settings in numbers.values() for key in settings):
        lines: dict[str, list[tuple[float, Timing]]] = {}
        for name, ratio in ratios.items():
            if key in numbers[name]:
                words = [word for word in name.split(" ") if not word.startswith(f"{key}=")]
                points = lines.setdefault(" ".join(words), [])
                points.append((numbers[name][key], ratio))
        if any(len(points) > 1 for points in lines.values()):
            levels = {
                name: ratio.median
                for name, ratio in ratios.items()
                if key not in numbers[name] and key not in found[name].settings
            }
            yield _sweep(found, key, lines, levels)


def _sweep(
    found: Comparison,
    key: str,
    lines: dict[str, list[tuple[float, Timing]]],
    levels: dict[str, float],
) -> Figure:
    """Return the figure of one setting.

    Args:
        found: the comparison.
        key: the setting.
        lines: by name, its values with the speed-ups.
        levels: by name, the speed-up of a row without that setting.
    """
    series = {}
    spreads = {}
    values = set()
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        series[name] = [(value, ratio.median) for value, ratio in points]
        spreads[name] = [ratio.spread for _, ratio in points]
        values |= {value for value, _ in points}
    for name, level in levels.items():
        series[name] = [(value, level) for value in sorted(values)]

    axis = _AXES.get(key, key.replace("_", " "))
    chart = Lines(axis, f"times {one_device(found)}", series, spreads, chosen=True)
    caption = "Each at the median of its turns, from the lowest to the highest; higher is faster."
    if levels:
        caption += " Lines that are level all the way are of rows without that setting."
    return Figure(f"sweep-{key}", f"Speed-up over {one_device(found)}, by {axis}", chart, caption)


def _numbers_of(row: Row) -> dict[str, float]:
    """The settings of a row that are numbers; the number of devices too, where the rows' names
    have it.
    """
    numbers = {key: float(v) for key, v in row.settings.items() if type(v) in (int, float)}
    return numbers | ({"devices": float(len(row.devices))} if " devices=" in row.name else {})


def _overview(found: Comparison) -> Table:
    columns = [*speed_columns(found), START, MOVED]
    rows = [
        [row.name, *(column.cell(row) for column in columns), row.where] for row in found.measured
    ]
    head = ["", *(column.title or column.head for column in columns), "devices"]
    caption = (
        "Efficiency: the speed-up over one device, for each device. Memory: the largest, of a "
        "process or an "
        "accelerator. Start: until the first step is done. Moved: what a device gives to the "
        "others in a step, where "
        "that is known."
    )
    return Table("overview", "All of it", head, rows, caption)


def _memory(found: Comparison) -> Figure:
    bars = [
        (
            f"{row.name} {row.devices[i]}" if len(row.peaks) > 1 else row.name,
            peak / 2**20,
            row.strategy,
        )
        for row in found.measured
        for i, peak in enumerate(row.peaks)
    ]
    names, values, kinds = zip(*bars, strict=True)
    what = (
        "process; one that drives several CPU devices has one bar" if found.on_slots else "device"
    )
    return Figure(
        "memory", "Memory at most", Bars("MiB", names, values, kinds=kinds), f"Of each {what}."
    )


def _time(found: Comparison) -> Section:
    known = [row for row in found.measured if row.shares]
    if not known:
        return Section("Where the time goes")
    steps = [1e3 * found.samples_of(row) / row.timing.median for row in known]
    parts = {
        kind: [step * row.shares[kind] for row, step in zip(known, steps, strict=True)]
        for kind in known[0].shares
    }
    text = []
    if others := [row.name for row in found.measured if not row.shares]:
        text.append(
            f"Not known of {', '.join(others)}: one clock can't tell of stages that take turns."
        )
    if hidden := [row.name for row in known if row.glance is not None and row.glance.overlaps]:
        text.append(
            f"Communicating, of {', '.join(hidden)}: what backward did not hide, since sums run "
            "while it computes."
        )
    caption = (
        "Of one global batch, at the rate of the median turn; how it divides is the mean over "
        "ranks (or replicas) of a "
        "few steps that were clocked apart. Shorter is faster."
    )
    chart = Stacks("ms", [row.name for row in known], parts)
    return Section(
        "Where the time goes", [Figure("time", "A step, in milliseconds", chart, caption)], text
    )


def _turns(found: Comparison) -> Iterator[Figure]:
    for row in found.measured:
        if row.glance is not None and row.glance.timelines:
            chart, caption = turns_of(row.glance.timelines)
            name = "turns-" + "".join(letter if letter.isalnum() else "-" for letter in row.name)
            yield Figure(
                name, f"{row.name}: the stages' turns in one step, in milliseconds", chart, caption
            )


def _losses(found: Comparison) -> Iterator[Section]:
    trained = [row for row in found.measured if row.history]
    if not trained:
        return
    figures = []
    for name, title in (("train_loss", "Training loss"), ("eval_loss", "Evaluation loss")):
        series = {
            row.name: [
                (float(one["epoch"]), float(one[name]))
                for one in _epochs(row)
                if one.get(name) is not None
            ]
            for row in trained
        }
        if any(series.values()):
            chart = Lines(
                "epoch", title.lower(), {key: points for key, points in series.items() if points}
            )
            caption = "Laid over one another: with single-device results all are one line."
            figures.append(Figure(name.replace("_", "-"), title, chart, caption))
    columns = outcome_columns(found)
    rows = [
        [row.name, str(len(_epochs(row))), *(column.cell(row) for column in columns)]
        for row in trained
    ]
    reached = Table(
        "reached", "Reached", ["", "epochs", *(column.head for column in columns)], rows
    )
    yield Section("What was learned", [*figures, reached])


def _epochs(row: Row) -> list[dict[str, Any]]:
    """The records at the ends of epochs, without those in between."""
    return [record for record in row.history if "train_loss" in record]


def _numbers(found: Comparison) -> Section:
    rows: list[list[str]] = []
    reasons: list[str] = []
    for row in found.rows:
        agreement = row.agreement
        if agreement is None:
            continue
        difference = "" if agreement.difference is None else f"{agreement.difference:.1e}"
        against = (
            f"single in {agreement.micro_batches} micro-batches"
            if agreement.micro_batches > 1
            else "single"
        )
        rows.append(
            [row.name, agreement.word, difference, agreement.precision or "the job's own", against]
        )
        reasons += [f"{row.name}: {agreement.reason}"] if agreement.reason else []
    if not rows:
        return Section("The same results?")
    caption = (
        "The largest difference of any parameter after three steps, one of them on a smaller "
        "batch, as a part of how "
        "far it went. In fp64 rounding is near 1e-15, and a fault shows as 1e-3."
    )
    head = ["", "numbers", "difference", "format", "held against"]
    table = Table("parity", "Each against one device", head, rows, caption)
    return Section("The same results?", [table], [*reasons, *caveats_of(found)])


def _seen(found: Comparison) -> Table:
    rows = []
    for row in found.measured:
        for one in () if row.glance is None else row.glance.devices:
            ids = one.samples or ()
            shown = ", ".join(map(str, ids[:_IDS])) + (", ..." if len(ids) > _IDS else "")
            count = "" if one.samples is None else f"{len(ids):,}"
            rows.append(
                [row.name, one.device, count, written(one.inputs), written(one.outputs), shown]
            )
    head = ["", "device", "samples", "inputs", "outputs", "sample ids"]
    caption = (
        "Of the first global batch; inputs and outputs of one micro-batch, as the model has them. "
        "All together are the "
        "same samples in each row."
    )
    return Table("devices", "Sizes, and which samples", head, rows, caption)
