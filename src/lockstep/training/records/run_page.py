"""The page of one run: what it reached, its curves, memory, where the time went, sizes on each
device.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import StrategyError, counted
from lockstep.report.charts import Lines, short
from lockstep.report.page import Figure, Page, Section, write
from lockstep.report.table import Table
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import Strategy, kind_of

Record = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""

_NO_METRICS = {
    "epoch",
    "step",
    "lr",
    "seconds",
    "samples_per_second",
    "tokens_per_second",
    "loss",
    "train_loss",
    "eval_loss",
}
"""What a record has beside metrics."""

_LOSSES = {"eval_loss": "Evaluation loss", "train_loss": "Training loss", "loss": "Loss"}
"""By name, what a loss is called; the first one that a record has is shown."""

_CHOSEN = ("microbatches", "split_size", "schedule")
"""Settings of strategies that may have been chosen for the machine."""


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run.

    Raises:
        FolderError: there is no such run, or the report can't be written.
        InputError: what a report needs isn't installed.
    """
    run = RunFolder.existing(folder)
    return write(page_of(run), run.path)


def page_of(run: RunFolder) -> Page:
    """Return all that a run's folder has of it."""
    config = run.read_json(run.config)
    history = run.read_metrics()
    summary = {}
    if run.summary.is_file():
        summary = run.read_json(run.summary)

    devices = config["devices"]
    where = f"{len(devices)} devices"
    if len(devices) == 1:
        where = devices[0]

    notes = []
    if run.failure.is_file():
        notes.append(f"The training failed: {run.read_json(run.failure)['error']}")
    elif not summary:
        notes.append("The training was stopped before its end.")

    return Page(
        title=f"{config['job']}: {config['strategy']} on {where}",
        verdict=_verdict(summary, history),
        notes=notes,
        sections=list(_sections(run, config, summary, history)),
        facts=list(_facts(config, summary)),
        command=command(config),
    )


def _facts(config: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what was trained where, by name."""
    yield "job", config["file"] or config["job"]
    yield "strategy", config["strategy"]
    yield "devices", ", ".join(config["devices"])
    for line in config.get("mesh", ()):
        name, _, place = line.partition(": ")
        yield name, place

    for name, version in summary.get("versions", {}).items():
        yield name, str(version)


def _verdict(summary: Mapping[str, Any], history: Sequence[Record]) -> str:
    """Return ``Evaluation loss 0.12, accuracy 0.97 after 3 epochs, 9,000 samples per second, 12 s
    in all.``
    """
    if not history:
        return "No epoch was finished."

    last = history[-1]
    words = []
    for name, text in _LOSSES.items():
        if name in last:
            words.append(f"{text} {short(last[name])}")
            break

    for name in _metrics([last]):
        value = last[name]
        if value is not None:
            words.append(f"{name} {short(value)}")

    text = f"{', '.join(words)} after {counted(last['epoch'], 'epoch')}"
    if summary:
        text += f", {short(summary['samples_per_second'])} samples per second"
        text += f", {short(summary['seconds'])} s in all"

    return f"{text}."


def _metrics(history: Sequence[Record]) -> list[str]:
    """Return the names of all metrics, in their order."""
    names: dict[str, None] = {}
    for record in history:
        names |= dict.fromkeys(record)
    return [name for name in names if name not in _NO_METRICS]


def _sections(
    run: RunFolder,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: Sequence[Record],
) -> Iterator[Section]:
    """Yield the parts of the page that this run has something for."""
    if history:
        yield Section("What was learned", list(_curves(history)))

    profile = run.profile / "summary.json"
    if profile.is_file():
        yield _time(run.read_json(profile))

    if summary.get("peak_memory_bytes"):
        yield Section("Memory", [_memory(summary)])

    yield Section("Settings", [_settings(config["settings"])])


def _curves(history: Sequence[Record]) -> Iterator[Figure]:
    """Yield the losses, then each metric."""
    # An epoch that ended early has a record too, and another one where it was resumed.
    epochs = {record["epoch"] for record in history}
    by = "epoch" if len(epochs) == len(history) else "step"

    losses = {}
    for name, title in _CURVES.items():
        points = _points(history, by, name)
        if points:
            losses[title] = points
    yield Figure("loss", "Loss", Lines(by, "loss", losses))

    for name in _metrics(history):
        # ``clean/accuracy`` is in no folder.
        file = re.sub(r"[\W_]", "-", name)
        points = _points(history, by, name)
        yield Figure(file, name, Lines(by, name, {name: points}))


_CURVES = {
    "train_loss": "train",
    "eval_loss": "eval",
    "loss": "train, since the last log",
}
"""The curves of losses, by the names of their values."""


def _points(history: Sequence[Record], by: str, name: str) -> list[tuple[float, float]]:
    """Return the points of a curve, from the records that have that value.

    Args:
        history: the records.
        by: ``epoch`` or ``step``, the horizontal axis.
        name: of the value.
    """
    points = []
    for record in history:
        value = record.get(name)
        if isinstance(value, int | float):
            place = float(record[by])
            points.append((place, float(value)))

    return points


def _memory(summary: Mapping[str, Any]) -> Table:
    """Return the largest memory of each process, or accelerator."""
    peaks = summary["peak_memory_bytes"]
    names = summary["devices"]
    if len(names) != len(peaks):
        names = [f"process {i}" for i in range(len(peaks))]
    rows = []
    for name, peak in zip(names, peaks, strict=True):
        rows.append([name, short(peak / 2**20)])
    title = "Memory at most, in MiB"
    return Table(["", "MiB"], rows, title, "Of each process, or accelerator.")


def _time(profile: Mapping[str, Any]) -> Section:
    """Return what the profiled steps spent their time on."""
    kind = next(kind for kind in ("replica", "device", "rank") if f"{kind}s" in profile)
    head = [kind]
    rows = []
    for row in profile[f"{kind}s"]:
        name = row["device"]
        if kind != "device":
            name = f"{row[kind]} {name}"
        head = [kind, *row["seconds"]]
        times = [short(1e3 * seconds) for seconds in row["seconds"].values()]
        rows.append([name, *times])

    steps = f"Steps {profile['first_step']} to {profile['last_step']}, a mean."
    table = Table(head, rows, "A step, in milliseconds", steps)
    return Section("Where the time goes", [table], profile["notes"])


def _settings(settings: Mapping[str, Any]) -> Table:
    """Return the job's settings that are set."""
    rows = []
    for name, value in settings.items():
        if value is not None:
            rows.append([name, str(value)])
    return Table(["setting", "value"], rows, "Of the job")


def command(config: Mapping[str, Any]) -> str:
    """Return the command that trains the same again.

    "" where the job isn't a file, or the strategy has no name.
    """
    if config["file"] is None:
        return ""

    try:
        strategy = kind_of(config["strategy"])
    except StrategyError:
        return ""

    words = ["lockstep", "train", config["file"]]
    placed = {"strategy": config["strategy"], "devices": _devices(config["devices"])}
    words += _words(placed)
    words += _words(_options(strategy, config["strategy_settings"]))
    for name, value in config["set"].items():
        words.append("--set")
        words.append(f"{name}={value}")
    words += _words(config["given"])
    return shlex.join(words)


def _options(strategy: type[Strategy], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the strategy's settings that aren't the usual ones, or were chosen for the machine."""
    options = {}
    usual = strategy.usual()
    for name in strategy.settings():
        value = settings.get(name)
        is_given = name in _CHOSEN or value != usual[name]
        if is_given and value is not None:
            options[name] = value

    device_map = settings.get("device_map")
    if device_map is not None:  # the one that was found too
        options["map"] = json.dumps(device_map)
    return options


def _devices(names: Sequence[str]) -> str:
    """Return ``2xcpu``, ``cuda:0,2``."""
    kind = names[0].partition(":")[0]
    if kind == "cpu":
        return f"{len(names)}xcpu"
    numbers = [name.partition(":")[2] for name in names]
    return f"{kind}:{','.join(numbers)}"


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``--batch-size 8 --shuffle false``."""
    for name, value in options.items():
        word = str(value)
        if isinstance(value, bool):
            word = word.lower()
        yield f"--{name.replace('_', '-')}"
        yield word
