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

_NOT_CURVES = {
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

_CHOSEN = ("microbatches", "split_size", "schedule")  # which may have been chosen for this machine


def write_page(folder: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run.

    Raises:
        FolderError: there is no such run, or the report can't be written.
        InputError: what a report needs isn't installed.
    """
    kept = RunFolder.existing(folder)
    return write(page_of(kept), kept.path)


def page_of(kept: RunFolder) -> Page:
    """All that a run's folder tells."""
    config = kept.read_json(kept.config)
    summary = kept.read_json(kept.summary) if kept.summary.is_file() else {}
    history = kept.read_metrics()
    devices = config["devices"]
    where = devices[0] if len(devices) == 1 else f"{len(devices)} devices"
    facts = [
        ("job", config["file"] or config["job"]),
        ("strategy", config["strategy"]),
        ("devices", ", ".join(devices)),
        *(
            (who, what)
            for who, _, what in (line.partition(": ") for line in config.get("mesh", ()))
        ),
        *((name, str(value)) for name, value in summary.get("versions", {}).items()),
    ]
    return Page(
        title=f"{config['job']}: {config['strategy']} on {where}",
        verdict=_verdict(summary, history),
        notes=_ends(kept, summary),
        sections=[one for one in _sections(kept, config, summary, history) if one.parts],
        facts=facts,
        command=command(config),
    )


def _ends(kept: RunFolder, summary: Mapping[str, Any]) -> list[str]:
    """How the training ended, unless it went to its end."""
    if kept.failure.is_file():
        return [f"The training failed: {kept.read_json(kept.failure)['error']}"]
    return [] if summary else ["The training was stopped before its end."]


def _verdict(summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    if not history:
        return "No epoch was finished."
    last = history[-1]
    found = (("Evaluation loss", "eval_loss"), ("Training loss", "train_loss"), ("Loss", "loss"))
    which, loss = next((which, last[name]) for which, name in found if name in last)
    reached = [f"{which} {short(loss)}"]
    reached += [
        f"{name} {short(last[name])}"
        for name in last
        if name not in _NOT_CURVES and last[name] is not None
    ]
    said = f"{', '.join(reached)} after {counted(last['epoch'], 'epoch')}"
    if summary:
        said += (
            f", {short(summary['samples_per_second'])} samples per second, "
            f"{short(summary['seconds'])} s in all"
        )
    return f"{said}."


def _sections(
    kept: RunFolder,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> Iterator[Section]:
    yield Section("What was learned", list(_curves(history)))
    yield Section("How fast", list(_rates(history)))
    profile = kept.profile / "summary.json"
    if profile.is_file():
        yield _time(kept.read_json(profile))
        yield Section("Who computes when", list(_turns(kept)))
    if summary.get("peak_memory_bytes"):
        peaks = summary["peak_memory_bytes"]
        devices = summary["devices"]
        names = (
            devices if len(devices) == len(peaks) else [f"process {i}" for i in range(len(peaks))]
        )
        chart = Bars("MiB", names, [peak / 2**20 for peak in peaks])
        yield Section(
            "Memory",
            [Figure("memory", "Memory at most", chart, "Of each process, or accelerator.")],
        )
    if inside := summary.get("shapes", {}).get("devices"):
        rows = [[one["device"], _sizes(one["inputs"]), _sizes(one["outputs"])] for one in inside]
        title = "Sizes of the first micro-batch"
        yield Section(
            "What each device sees",
            [Table("devices", title, ["device", "inputs", "outputs"], rows)],
        )
    settings = [
        [name, str(value)] for name, value in config["settings"].items() if value is not None
    ]
    yield Section("Settings", [Table("settings", "Of the job", ["setting", "value"], settings)])


def _curves(history: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    # An epoch that ended early has a record too, and another one where it was resumed.
    by = "epoch" if len({record["epoch"] for record in history}) == len(history) else "step"
    losses = {name: _points(history, by, f"{name}_loss") for name in ("train", "eval")}
    losses["train, since the last log"] = _points(history, by, "loss")
    if history:
        yield Figure(
            "loss", "Loss", Lines(by, "loss", {name: line for name, line in losses.items() if line})
        )
    for name in dict.fromkeys(
        name for record in history for name in record if name not in _NOT_CURVES
    ):
        yield Figure(_file_of(name), name, Lines(by, name, {name: _points(history, by, name)}))


def _rates(history: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    epochs = [record for record in history if "train_loss" in record]
    if epochs:
        names = [f"epoch {record['epoch']}" for record in epochs[:40]]
        rates = [record["samples_per_second"] for record in epochs[:40]]
        caption = "The first epoch warms up." + (
            " The first 40 epochs." if len(epochs) > 40 else ""
        )
        yield Figure(
            "speed", "Samples per second", Bars("samples per second", names, rates), caption
        )


def _points(history: Sequence[Mapping[str, Any]], by: str, name: str) -> list[tuple[float, float]]:
    return [
        (float(one[by]), float(one[name]))
        for one in history
        if isinstance(one.get(name), int | float)
    ]


def _time(profile: Mapping[str, Any]) -> Section:
    whose = next(whose for whose in ("replica", "device", "rank") if f"{whose}s" in profile)
    rows = profile[f"{whose}s"]
    names = [
        row["device"] if whose == "device" else f"{whose} {row[whose]} {row['device']}"
        for row in rows
    ]
    parts = {kind: [1e3 * row["seconds"][kind] for row in rows] for kind in rows[0]["seconds"]}
    steps = f"Steps {profile['first_step']} to {profile['last_step']}, a mean."
    figure = Figure("time", "A step, in milliseconds", Stacks("ms", names, parts), steps)
    return Section("Where the time goes", [figure], profile["notes"])


def _turns(kept: RunFolder) -> Iterator[Figure]:
    path = kept.profile / "timeline.json"
    if path.is_file():
        chart, caption = turns_of(kept.read_json(path)["timelines"])
        yield Figure("turns", "The stages' turns in one step, in milliseconds", chart, caption)


def _sizes(shapes: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(
        f"{name} {' x '.join(map(str, shape))}".strip() for name, shape in shapes.items()
    )


def _file_of(name: str) -> str:
    """A metric's name as one of a file: ``clean/accuracy`` is in no folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def command(config: Mapping[str, Any]) -> str:
    """What trains the same again; "" where the job isn't a file, or no word names its strategy."""
    if config["file"] is None:
        return ""
    try:
        own, strategy = config["strategy_settings"], kind_of(config["strategy"])
    except StrategyError:
        return ""
    devices = config["devices"]
    kind = devices[0].partition(":")[0]
    said = (
        f"{len(devices)}xcpu"
        if kind == "cpu"
        else f"{kind}:{','.join(d.partition(':')[2] for d in devices)}"
    )
    words = [
        "lockstep",
        "train",
        config["file"],
        "--strategy",
        config["strategy"],
        "--devices",
        said,
    ]
    usual = strategy.usual()
    for name in sorted(strategy.settings(), key=(*_CHOSEN, *usual).index):
        value = own.get(name)
        if value is not None and (name in _CHOSEN or value != usual[name]):
            words += [
                f"--{name.replace('_', '-')}",
                str(value).lower() if isinstance(value, bool) else str(value),
            ]
    if own.get("device_map") is not None:  # the one that was found too
        words += ["--map", json.dumps(own["device_map"])]
    words += [
        word for name, value in config["set"].items() for word in ("--set", f"{name}={value}")
    ]
    for name, value in config["given"].items():
        words += [f"--{name.replace('_', '-')}", str(value).lower()]
    return shlex.join(words)
