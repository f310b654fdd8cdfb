"""The page of one run: what it reached, its curves and its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import counted
from lockstep.report.charts import Lines, short
from lockstep.report.page import Figure, Page, Section, write
from lockstep.report.table import Table
from lockstep.run.run_folder import RunFolder

Record = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""

_NO_METRICS = {"epoch", "step", "lr", "seconds", "samples_per_second"}
"""What a record has beside losses and metrics."""

_LOSSES = {
    "train_loss": "train",
    "eval_loss": "eval",
    "loss": "train, since the last log",
}
"""The losses, which share a chart, and what they are called there."""


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run.

    Raises:
        FolderError: there is no such run, or the report can't be written.
        InputError: what a report needs isn't installed.
    """
    run = RunFolder.existing(folder)
    config = run.read_json(run.config)
    history = run.read_metrics()
    summary = {}
    if run.summary.is_file():
        summary = run.read_json(run.summary)

    notes = []
    if run.failure.is_file():
        notes.append(f"The training failed: {run.read_json(run.failure)['error']}")
    elif not summary:
        notes.append("The training was stopped before its end.")

    facts = [
        ("job", config["file"] or config["job"]),
        ("strategy", config["strategy"]),
        ("devices", ", ".join(config["devices"])),
    ]
    facts += summary.get("versions", {}).items()

    sections = []
    if history:
        sections.append(Section("What was learned", list(_curves(history))))
    sections.append(Section("Settings", [_settings(config["settings"])]))

    devices = counted(len(config["devices"]), "device")
    page = Page(
        title=f"{config['job']}: {config['strategy']} on {devices}",
        verdict=_verdict(history),
        notes=notes,
        sections=sections,
        facts=facts,
    )
    return write(page, run.path)


def _settings(settings: Mapping[str, Any]) -> Table:
    """Return the job's settings that are set."""
    rows = []
    for name, value in settings.items():
        if value is not None:
            rows.append([name, str(value)])
    return Table(["setting", "value"], rows, "Of the job")


def _verdict(history: Sequence[Record]) -> str:
    """Return ``eval_loss 0.12, accuracy 0.97 after 3 epochs.``"""
    if not history:
        return "No epoch was finished."

    last = history[-1]
    words = []
    for name in _names([last]):
        value = last[name]
        if value is not None:
            words.append(f"{name} {short(value)}")
    return f"{', '.join(words)} after {counted(last['epoch'], 'epoch')}."


def _names(history: Sequence[Record]) -> list[str]:
    """Return the names of all losses and metrics, in their order."""
    names: dict[str, None] = {}
    for record in history:
        names |= dict.fromkeys(record)
    return [name for name in names if name not in _NO_METRICS]


def _curves(history: Sequence[Record]) -> Iterator[Figure]:
    """Yield the losses, then each metric."""
    # An epoch that ended early has a record too, and another one where it was resumed.
    epochs = {record["epoch"] for record in history}
    by = "epoch" if len(epochs) == len(history) else "step"

    curves = {}
    for name in _names(history):
        points = []
        for record in history:
            value = record.get(name)
            if isinstance(value, int | float):
                points.append((float(record[by]), float(value)))
        curves[name] = points

    losses = {}
    for name, title in _LOSSES.items():
        if name in curves:
            losses[title] = curves.pop(name)
    yield Figure("loss", "Loss", Lines(by, "loss", losses))

    for name, points in curves.items():
        file = re.sub(r"[\W_]", "-", name)  # ``clean/accuracy`` is in no folder
        yield Figure(file, name, Lines(by, name, {name: points}))
