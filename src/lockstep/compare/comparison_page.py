"""The report of a comparison, as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.compare.advice import best_of, sentence, unsteady
from lockstep.compare.comparison_table import (
    SPEED,
    batches_of,
    caveats_of,
    cells_of,
    explained,
    one_device,
    plans_of,
    reached,
    table,
)
from lockstep.compare.observed_updates import DeviceBatch
from lockstep.compare.result import Comparison, Row
from lockstep.compare.sweep_figures import sweeps_of
from lockstep.errors import counted
from lockstep.report.charts import Bars, Lines, Stacks
from lockstep.report.page import Figure, Page, Section, write
from lockstep.report.table import Table
from lockstep.training.records.batch_shapes import written

_IDS = 4
"""Sample ids that are shown of a device."""


def write_page(found: Comparison) -> Path:
    """Write the report of a comparison into its folder.

    Raises:
        InputError: what a report needs isn't installed.
        FolderError: it can't be written.
    """
    return write(page_of(found), Path(found.folder))


def page_of(found: Comparison) -> Page:
    """Return the page of a comparison, in the order in which a person asks."""
    turns = f"{counted(found.rounds, 'turn')} of {found.seconds:g} s or more in alternation"
    notes = [
        f"Batches of {batches_of(found)}; each row in fresh processes, {turns}; bars show the "
        "median turn, and the lines on them the lowest and the highest."
    ]
    if found.on_slots:
        notes.append(
            "The devices are CPU devices: cores of one machine, which share its memory and caches. "
            "Speed-ups on GPUs may be larger or smaller."
        )
    warning = unsteady(found)
    if warning:
        notes.append(warning)

    best = best_of(found)
    sections = [_failed(found), _same_results(found)]
    if found.measured:
        sections = _measured(found)
    return Page(
        title=f"{Path(found.job).name}: strategies side by side",
        verdict=sentence(found),
        notes=notes,
        sections=[section for section in sections if section.parts or section.text],
        facts=[(name, str(value)) for name, value in found.machine.items()],
        command=found.command,
        advice="" if best is None else best.line,
    )


def _measured(found: Comparison) -> list[Section]:
    """Return the sections of a page where something was measured."""
    return [
        Section("How fast", [_speed(found), *sweeps_of(found), _overview(found)]),
        _failed(found),
        Section("Memory", [_memory(found)]),
        _time(found),
        Section("Who computes when", [], plans_of(found)),
        Section("What was learned", list(_outcome(found))),
        _same_results(found),
        Section("What each device gets of a batch", [_seen(found)]),
    ]


def _failed(found: Comparison) -> Section:
    """Return the section of the rows that failed."""
    failed = []
    for row in found.rows:
        if not row.rates:
            failed.append([row.name, row.reason])
    tables = []
    if failed:
        tables.append(Table("failed", "And why", ["", "reason"], failed))
    return Section("What could not be measured", tables)


def _speed(found: Comparison) -> Figure:
    """Return the figure of rates, with the speed-up over one device behind each bar."""
    names = []
    values = []
    spreads = []
    kinds = []
    notes = []
    for row in found.measured:
        names.append(row.name)
        values.append(row.timing.median)
        spreads.append(row.timing.spread)
        kinds.append(row.strategy)
        ratio = found.speed_up(row)
        note = ""
        if ratio is not None and row.name != row.one:
            note = f"{ratio.median:.2f} x"
        notes.append(note)
    chart = Bars("samples per second", names, values, spreads, kinds, notes)
    caption = f"Longer is faster; x: times {one_device(found)}."
    return Figure("speed", "Samples per second", chart, caption)


def _overview(found: Comparison) -> Table:
    """Return the table of speed and memory."""
    caption = (
        f"{explained(found)}. Effic.: the speed-up over one device, for each device. Memory: the "
        "largest, of a process or an accelerator. Start: until the first step is done. Moved: "
        "the bytes that a device sends to the others in a step, if known."
    )
    columns = (*SPEED, "start", "moved", "devices")
    return table("overview", "All of it", cells_of(found), columns, caption)


def _memory(found: Comparison) -> Figure:
    """Return the figure of memory: a bar for each process, or each accelerator."""
    names = []
    values = []
    kinds = []
    for row in found.measured:
        for i, peak in enumerate(row.peaks):
            name = row.name
            if len(row.peaks) > 1:
                name += f" {row.devices[i]}"
            names.append(name)
            values.append(peak / 2**20)
            kinds.append(row.strategy)
    caption = "Of each device."
    if found.on_slots:
        caption = "Of each process; one that drives several CPU devices has one bar."
    chart = Bars("MiB", names, values, kinds=kinds)
    return Figure("memory", "Memory at most", chart, caption)


def _time(found: Comparison) -> Section:
    """Return the section that shows where the time of a step goes."""
    title = "Where the time goes"
    names = []
    others = []
    hidden = []
    parts: dict[str, list[float]] = {}
    for row in found.measured:
        if not row.shares:
            others.append(row.name)
            continue
        names.append(row.name)
        step = 1e3 * found.samples_of(row) / row.timing.median
        for kind, share in row.shares.items():
            parts.setdefault(kind, []).append(step * share)
        observed = row.observed
        if observed is not None and observed.overlaps:
            hidden.append(row.name)

    text = []
    if others:
        those = ", ".join(others)
        text.append(f"Not known of {those}: one clock can't time stages that take turns.")
    if hidden:
        those = ", ".join(hidden)
        text.append(
            f"Communicating, of {those}: what backward did not hide, since sums run while it "
            "computes."
        )
    if not names:
        return Section(title, [], text)
    caption = (
        "Of one global batch, at the rate of the median turn; how it divides is the mean over ranks "
        "(or replicas) of a few steps that were clocked apart. Shorter is faster."
    )
    chart = Stacks("ms", names, parts)
    figure = Figure("time", "A step, in milliseconds", chart, caption)
    return Section(title, [figure], text)


def _outcome(found: Comparison) -> Iterator[Figure | Table]:
    """Yield the losses, and what was reached, with ``epochs``."""
    if not any(row.history for row in found.measured):
        return
    caption = "With single-device results all curves coincide."
    titles = {
        "train_loss": "Training loss",
        "eval_loss": "Evaluation loss",
    }
    for loss, title in titles.items():
        series = {}
        for row in found.measured:
            points = _points(row, loss)
            if points:
                series[row.name] = points
        if series:
            chart = Lines("epoch", title.lower(), series)
            yield Figure(loss.replace("_", "-"), title, chart, caption)
    yield reached(found)


def _points(row: Row, loss: str) -> list[tuple[float, float]]:
    """Return epoch and loss, for each whole epoch of a row that has this loss.

    Args:
        row: with a history; its records of logs and evaluations within an epoch are left out.
        loss: ``train_loss`` or ``eval_loss``.
    """
    points = []
    for record in row.history:
        value = record.get(loss)
        if "train_loss" in record and value is not None:
            points.append((float(record["epoch"]), float(value)))
    return points


def _same_results(found: Comparison) -> Section:
    """Return the section that compares the numbers of each row with those of one device."""
    title = "The same results?"
    rows = []
    reasons = []
    for row in found.rows:
        agreement = row.agreement
        if agreement is None:
            continue
        difference = ""
        if agreement.difference is not None:
            difference = f"{agreement.difference:.1e}"
        against = "single"
        if agreement.micro_batches > 1:
            against = f"single in {agreement.micro_batches} micro-batches"
        precision = agreement.precision or "the job's own"
        rows.append([row.name, agreement.word, difference, precision, against])
        if agreement.reason:
            reasons.append(f"{row.name}: {agreement.reason}")
    if not rows:
        return Section(title)
    caption = (
        "The largest difference of any parameter after three steps, one of them on a smaller "
        "batch, relative to the parameter's change. In fp64 rounding is near 1e-15, and an error "
        "shows as 1e-3."
    )
    head = ["", "numbers", "difference", "format", "held against"]
    table = Table("parity", "Each against one device", head, rows, caption)
    return Section(title, [table], [*reasons, *caveats_of(found)])


def _seen(found: Comparison) -> Table:
    """Return the table of what each device has of the first batch."""
    rows = []
    for row in found.measured:
        if row.observed is not None:
            for device in row.observed.devices:
                rows.append([row.name, *_cells_of(device)])
    head = ["", "device", "samples", "inputs", "outputs", "sample ids"]
    caption = (
        "Of the first global batch; inputs and outputs of one micro-batch, as the model has them. "
        "All together are the same samples in each row."
    )
    return Table("devices", "Sizes, and which samples", head, rows, caption)


def _cells_of(batch: DeviceBatch) -> list[str]:
    """Return the cells of a device: its name, samples, inputs, outputs, sample ids."""
    count = ""
    ids = ""
    samples = batch.samples
    if samples is not None:
        count = f"{len(samples):,}"
        ids = ", ".join(map(str, samples[:_IDS]))
        if len(samples) > _IDS:
            ids += ", ..."
    return [
        batch.device,
        count,
        written(batch.inputs),
        written(batch.outputs),
        ids,
    ]
