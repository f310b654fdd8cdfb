"""The report of a comparison, as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.compare.advice import best_of, sentence, unsteady
from lockstep.compare.comparison_table import (
    SPEED,
    START,
    batches_of,
    caveats_of,
    cells_of,
    explained,
    one_device,
    plans_of,
    reached,
    table,
)
from lockstep.compare.result import Comparison, Row
from lockstep.compare.sweep_figures import sweeps_of
from lockstep.errors import counted
from lockstep.report.charts import Bars, Lines
from lockstep.report.page import Figure, Page, Section, write
from lockstep.report.table import Table
from lockstep.training.records.batch_shapes import written


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
    failed = [f"{row.name}: {row.reason}" for row in found.rows if not row.rates]
    sections = [Section("What could not be measured", text=failed)]
    if found.measured:
        speed = Section("How fast", [_speed(found), *sweeps_of(found), _overview(found)])
        known = [*plans_of(found), *caveats_of(found)]
        sections = [
            speed,
            *sections,
            Section("What was learned", list(_outcome(found))),
            Section("What else is known", text=known),
            Section("What each device gets of a batch", [_shapes(found)]),
        ]
    return Page(
        title=f"{Path(found.job).name}: strategies side by side",
        verdict=sentence(found),
        notes=notes,
        sections=[section for section in sections if section.parts or section.text],
        facts=[(name, str(value)) for name, value in found.machine.items()],
        advice="" if best is None else best.line,
    )


def _speed(found: Comparison) -> Figure:
    """Return the figure of rates, with the speed-up over one device behind each bar."""
    names = []
    values = []
    spreads = []
    notes = []
    for row in found.measured:
        names.append(row.name)
        values.append(row.timing.median)
        spreads.append(row.timing.spread)
        ratio = found.speed_up(row)
        note = ""
        if ratio is not None and row.name != row.one:
            note = f"{ratio.median:.2f} x"
        notes.append(note)
    chart = Bars("samples per second", names, values, spreads, notes)
    caption = f"Longer is faster; x: times {one_device(found)}."
    return Figure("speed", "Samples per second", chart, caption)


def _overview(found: Comparison) -> Table:
    """Return the table of everything that was measured."""
    caption = (
        f"{explained(found)}. Effic.: the speed-up over one device, for each device. Memory: the "
        "largest, of a process or an accelerator. Start: until the first step is done. Parity: the "
        "largest difference of any parameter or buffer from single-device training, relative to "
        "its change."
    )
    columns = (*SPEED, *START, "devices")
    return table(cells_of(found), columns, "All of it", caption)


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


def _shapes(found: Comparison) -> Table:
    """Return the table of what each device has of the first batch."""
    rows = []
    for row in found.measured:
        for device in row.shapes:
            inputs = written(device["inputs"])
            outputs = written(device["outputs"])
            rows.append([row.name, device["device"], inputs, outputs])
    caption = "Of one micro-batch, as the model has them."
    return Table(["", "device", "inputs", "outputs"], rows, "Sizes", caption)
