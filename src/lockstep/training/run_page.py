"""The page of one run: what it reached, its curves, memory, where the time went, sizes on each
device.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import StrategyError, counted
from lockstep.launch.run_folder import RunFolder
from lockstep.report.charts import Bars, Lines, Stacks, short
from lockstep.report.page import Figure, Page, Section, Table, write
from lockstep.report.timeline_charts import turns_of
from lockstep.strategies import kind_of

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
    """All that a run's folder has of it."""
    config = run.read_json(run.config)
    summary = run.read_json(run.summary) if run.summary.is_file() else {}
    history = run.read_metrics()

    devices = config["devices"]
    where = devices[0] if len(devices) == 1 else f"{len(devices)} devices"
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
    """What was trained where, by name."""
    yield "job", config["file"] or config["job"]
    yield "strategy", config["strategy"]
    yield "devices", ", ".join(config["devices"])
    for line in config.get("mesh", ()):
        name, _, place = line.partition(": ")
        yield name, place
    for name, version in summary.get("versions", {}).items():
        yield name, str(version)


def _verdict(summary: Mapping[str, Any], history: Sequence[Record]) -> str:
    """``Evaluation loss 0.12, accuracy 0.97 after 3 epochs, 9,000 samples per second, 12 s in
    all.``
    """
    if not history:
        return "No epoch was finished."

    last = history[-1]
    names = {"eval_loss": "Evaluation loss", "train_loss": "Training loss", "loss": "Loss"}
    loss = next(name for name in names if name in last)
    words = [f"{names[loss]} {short(last[loss])}"]
    for name in _metrics([last]):
        if last[name] is not None:
            words.append(f"{name} {short(last[name])}")

    text = f"{', '.join(words)} after {counted(last['epoch'], 'epoch')}"
    if summary:
        text += f", {short(summary['samples_per_second'])} samples per second"
        text += f", {short(summary['seconds'])} s in all"
    return f"{text}."


def _metrics(history: Sequence[Record]) -> list[str]:
    """The names of all metrics, in their order."""
    names = dict.fromkeys(name for record in history for name in record)
    return [name for name in names if name not in _NO_METRICS]


def _sections(
    run: RunFolder,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: Sequence[Record],
) -> Iterator[Section]:
    """The parts of the page that this run has something for."""
    if history:
        yield Section("What was learned", list(_curves(history)))
    epochs = [record for record in history if "train_loss" in record]
    if epochs:
        yield Section("How fast", [_rates(epochs)])

    profile = run.profile / "summary.json"
    timeline = run.profile / "timeline.json"
    if profile.is_file():
        yield _time(run.read_json(profile))
    if profile.is_file() and timeline.is_file():
        chart, caption = turns_of(run.read_json(timeline)["timelines"])
        title = "The stages' turns in one step, in milliseconds"
        yield Section("Who computes when", [Figure("turns", title, chart, caption)])

    if summary.get("peak_memory_bytes"):
        yield Section("Memory", [_memory(summary)])

    devices = summary.get("shapes", {}).get("devices")
    if devices:
        yield Section("What each device sees", [_shapes(devices)])

    yield Section("Settings", [_settings(config["settings"])])


def _curves(history: Sequence[Record]) -> Iterator[Figure]:
    """The losses, then each metric."""
    # An epoch that ended early has a record too, and another one where it was resumed.
    is_by_epoch = len({record["epoch"] for record in history}) == len(history)
    by = "epoch" if is_by_epoch else "step"
    losses = {
        "train": _points(history, by, "train_loss"),
        "eval": _points(history, by, "eval_loss"),
        "train, since the last log": _points(history, by, "loss"),
    }
    losses = {name: points for name, points in losses.items() if points}
    yield Figure("loss", "Loss", Lines(by, "loss", losses))

    for name in _metrics(history):
        # ``clean/accuracy`` is in no folder.
        file = "".join(letter if letter.isalnum() else "-" for letter in name)
        yield Figure(file, name, Lines(by, name, {name: _points(history, by, name)}))


def _points(history: Sequence[Record], by: str, name: str) -> list[tuple[float, float]]:
    """The points of a curve, from the records that have that value.

    Args:
        history: the records.
        by: ``epoch`` or ``step``, the horizontal axis.
        name: of the value.
    """
    points = []
    for record in history:
        if isinstance(record.get(name), int | float):
            points.append((float(record[by]), float(record[name])))
    return points


def _rates(epochs: Sequence[Record]) -> Figure:
    """How fast each epoch was trained."""
    caption = "The first epoch warms up."
    if len(epochs) > 40:
        caption += " The first 40 epochs."
        epochs = epochs[:40]

    names = [f"epoch {record['epoch']}" for record in epochs]
    rates = [record["samples_per_second"] for record in epochs]
    chart = Bars("samples per second", names, rates)
    return Figure("speed", "Samples per second", chart, caption)


def _memory(summary: Mapping[str, Any]) -> Figure:
    """The largest memory of each process, or accelerator."""
    peaks = summary["peak_memory_bytes"]
    names = summary["devices"]
    if len(names) != len(peaks):
        names = [f"process {i}" for i in range(len(peaks))]
    chart = Bars("MiB", names, [peak / 2**20 for peak in peaks])
    return Figure("memory", "Memory at most", chart, "Of each process, or accelerator.")


def _time(profile: Mapping[str, Any]) -> Section:
    """What the profiled steps spent their time on."""
    kind = next(kind for kind in ("replica", "device", "rank") if f"{kind}s" in profile)
    rows = profile[f"{kind}s"]
    names = [row["device"] for row in rows]
    if kind != "device":
        names = [f"{kind} {row[kind]} {row['device']}" for row in rows]

    milliseconds = {
        name: [1e3 * row["seconds"][name] for row in rows] for name in rows[0]["seconds"]
    }
    chart = Stacks("ms", names, milliseconds)
    caption = f"Steps {profile['first_step']} to {profile['last_step']}, a mean."
    figure = Figure("time", "A step, in milliseconds", chart, caption)
    return Section("Where the time goes", [figure], profile["notes"])


def _shapes(devices: Sequence[Mapping[str, Any]]) -> Table:
    """The sizes that each device has computed on."""
    rows = []
    for one in devices:
        inputs = _sizes(one["inputs"])
        outputs = _sizes(one["outputs"])
        rows.append([one["device"], inputs, outputs])
    return Table(
        "devices",
        "Sizes of the first micro-batch",
        ["device", "inputs", "outputs"],
        rows,
    )


def _settings(settings: Mapping[str, Any]) -> Table:
    """The job's settings that are set."""
    rows = []
    for name, value in settings.items():
        if value is not None:
            rows.append([name, str(value)])
    return Table("settings", "Of the job", ["setting", "value"], rows)


def _sizes(shapes: Mapping[str, Sequence[Any]]) -> str:
    """``tokens 4 x 12, mask 4 x 12``."""
    sizes = []
    for name, shape in shapes.items():
        sizes.append(f"{name} {' x '.join(map(str, shape))}".strip())
    return ", ".join(sizes)


def command(config: Mapping[str, Any]) -> str:
    """The command that trains the same again; "" where the job isn't a file, or the strategy has no
    name.
    """
    if config["file"] is None:
        return ""

    try:
        strategy = kind_of(config["strategy"])
    except StrategyError:
        return ""

    options: dict[str, Any] = {
        "strategy": config["strategy"],
        "devices": _devices(config["devices"]),
    }
    settings = config["strategy_settings"]
    usual = strategy.usual()
    for name in sorted(strategy.settings(), key=(*_CHOSEN, *usual).index):
        value = settings.get(name)
        if value is not None and (name in _CHOSEN or value != usual[name]):
            options[name] = value
    if settings.get("device_map") is not None:  # the one that was found too
        options["map"] = json.dumps(settings["device_map"])

    words = ["lockstep", "train", config["file"], *_words(options)]
    for name, value in config["set"].items():
        words += ["--set", f"{name}={value}"]
    return shlex.join([*words, *_words(config["given"])])


def _devices(names: Sequence[str]) -> str:
    """``2xcpu``, ``cuda:0,2``."""
    kind = names[0].partition(":")[0]
    if kind == "cpu":
        return f"{len(names)}xcpu"
    return f"{kind}:{','.join(name.partition(':')[2] for name in names)}"


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """``--batch-size 8 --shuffle false``."""
    for name, value in options.items():
        yield f"--{name.replace('_', '-')}"
        yield str(value).lower() if isinstance(value, bool) else str(value)
