"""The page docs/performance.md and its charts, as written from results/*.json.

    python -m benchmarks page

Every ratio of every file is in a table, but for those between yardsticks (``YARDSTICKS``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ratio_chart import Bar, chart

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"

Results = Mapping[str, Mapping[str, Any]]
"""What the files hold, by benchmark; of gpu.json each benchmark apart, as ``gpu/small``."""

WORKLOADS = {
    "checkpointing": "activation checkpointing",
    "compare": "`lockstep compare`",
    "experiment": "CIFAR-10",
    "loss": "`ParallelLoss`",
    "loss-check": "loss check",
    "loss-memory": "`ParallelLoss`, bytes",
    "map": "`lockstep.map`",
    "mobilenet": "MobileNetV2",
    "overhead": "small MLP",
    "parallel-mobilenet": "MobileNetV2, gradients",
    "parallel-stack": "Transformer, gradients",
    "partitioning-predictions": "`pp`, step times",
    "partitioning-splits": "`pp`, splits",
    "pipelining-char_lm": "char_lm",
    "pipelining-gpt2": "GPT-2",
    "pipelining-memory": "`pp`, 4 stages",
    "pipelining-product": "Transformer",
    "pipelining-resnet50": "ResNet-50",
    "pipelining-stack": "Transformer",
    "pipelining-unet": "U-Net",
    "sharding-char_lm": "char_lm",
    "sharding-memory": "char_lm, AdamW",
    "sharding-stack": "Transformer",
    "small": "small MLP",
    "sparse": "sparse embedding",
    "stack": "Transformer",
    "start": "first step",
    "surviving": "checkpoints",
    "gpu/ddp": "ResNet-50",
    "gpu/experiment": "CIFAR-10",
    "gpu/images": "images on the host",
    "gpu/look": "ResNet-50",
    "gpu/loss": "`ParallelLoss`",
    "gpu/loss-memory": "`ParallelLoss`, bytes",
    "gpu/replicas-resnet50": "ResNet-50",
    "gpu/replicas-small": "200 small layers",
    "gpu/resnet50": "ResNet-50",
    "gpu/small": "small MLP",
    "gpu/stages": "ResNet-50",
}
"""What is trained, or measured."""

YARDSTICKS = {
    "bare step",
    "bound",
    "one core, 16 micro-batches",
    "one core, as many micro-batches",
    "plain loop, pinned and copied ahead",
    "the module itself",
}
"""What a ratio is of that compares yardsticks with one another: it is in the file only."""

TIMES = {"finding batch 10^6", "from kill -9 to the next step", "waiting for a save"}
"""What a ratio of seconds is of: less is better."""

GOALS = {
    "loss-check": 0.01,
    "partitioning-predictions": 0.05,
    "partitioning-splits": 0.97,
    "seldom": 0.05,
}
"""Those that the files don't have; ``seldom`` is of a loss that isn't checked in every update."""

NOT_RECORDED = ("uneven-devices", "verifying")
"""Benchmarks without a file: what was found is in benchmarks/README.md."""

WORDS = {
    "plain, one slot": "plain loss",
    "plain, one CPU device": "plain loss",
    ", 16 micro-batches": "",
    "one slot": "one CPU device",
    "two slots": "two CPU devices",
    ", 2 slots": "",
    "slots": "CPU devices",
    "with a look": "with an older check",
    "pinned and copied ahead": "pinned",
    "multiprocessing.": "",
}
"""What the files call otherwise than the documentation."""


# ---- results, and their rows ---------------------------------------------------------------------


def read(folder: Path = RESULTS) -> Results:
    """Return what the files hold."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text()) | {"file": path.name}
        for row in kept.pop("rows") if path.stem == "gpu" else ():
            found[f"gpu/{row['benchmark']}"] = kept | row
        if path.stem != "gpu":
            found[path.stem] = kept
    return found


@dataclass(frozen=True)
class Row:
    """One ratio."""

    benchmark: str
    of: str
    to: str
    median: float
    spread: Sequence[float] = ()
    goal: float | None = None
    rounds: int | None = None
    less: bool = False
    percent: bool = False

    @property
    def missed(self) -> bool:
        """Whether there is a goal that the median doesn't reach."""
        if self.goal is None:
            return False
        return self.median > self.goal if self.less else self.median < self.goal

    @property
    def sides(self) -> tuple[str, str]:
        """Both sides, in the documentation's words."""
        return _worded(self.of), _worded(self.to)

    @property
    def what(self) -> str:
        """What is trained, or measured."""
        return WORKLOADS.get(self.benchmark, self.benchmark)

    def shown(self, value: float) -> str:
        """A number; a third decimal tells it from the goal where two are the same."""
        if self.percent:
            return f"{100 * value:.2f}%"
        near = self.goal is not None and f"{self.median:.2f}" == f"{self.goal:.2f}"
        return f"{value:.{3 if near else 2}f}"


def _worded(text: str) -> str:
    for word, ours in WORDS.items():
        text = text.replace(word, ours)
    return text


def rows(results: Results, benchmark: str) -> Iterator[Row]:
    """Yield the ratios of one benchmark, whatever the shape of its file."""
    result = results[benchmark]
    goal = GOALS.get(benchmark)
    for ratio in result.get("ratios", ()):
        if ratio["of"] not in YARDSTICKS:
            yield _of_ratio(benchmark, ratio, result)
    for split in result.get("splits", ()):
        nearest = min(split["ratios"].values(), key=lambda ratio: float(ratio["median"]))
        to = f"best of {split['tried']} others, {split['job']}"
        yield Row(benchmark, "found", to, split["least"], nearest["spread"], goal)
    if "cells" in result:
        to = f"measured, median of {len(result['cells'])}"
        error = result["median_error"]
        yield Row(benchmark, "error", to, error, goal=goal, less=True, percent=True)
    for job in result.get("rows", ()):
        seldom = job["a usual update"]["median"] == 0
        goals = (None, GOALS["seldom"]) if seldom else (goal, None)
        for kind, bar in zip(("a usual update", "all updates"), goals, strict=True):
            of, found = f"check, {job['job']}", job[kind]
            numbers = found["median"], found["spread"], bar
            yield Row(benchmark, of, kind, *numbers, less=True, percent=True)


def _of_ratio(benchmark: str, ratio: Mapping[str, Any], result: Mapping[str, Any]) -> Row:
    """A rate of bytes (1 / GB) becomes one of bytes: less is better."""
    rates = result.get("rates", {}).get(ratio["of"])
    rounds = len(rates) if rates else ratio.get("rounds")
    to = ratio["to"] + (f", beyond {ratio['over']}" if "over" in ratio else "")
    names = benchmark, ratio["of"], to
    median, spread, goal = ratio["median"], ratio["spread"], ratio["goal"]
    if result.get("unit", "").startswith("1 / GB"):
        turned = 1 / median, [1 / value for value in reversed(spread)], goal and 1 / goal
        return Row(*names, *turned, rounds, less=True)
    less = "over" in ratio or ratio["of"] in TIMES
    return Row(*names, median, spread, goal, rounds, less)


# ---- sections ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, a chart and a table.

    Args:
        picture: name of the chart; none is drawn without one.
        title: of the section.
        text: what is above the table.
        names: of benchmarks, or ``name: side`` for the ratios to that side only.
    """

    picture: str
    title: str
    text: str
    names: tuple[str, ...]

    def rows(self, results: Results) -> list[Row]:
        """Those of the benchmarks that are there, in order."""
        found = []
        for name in self.names:
            benchmark, _, side = name.partition(": ")
            its = rows(results, benchmark) if benchmark in results else ()
            found += [row for row in its if not side or row.to == side]
        return found


_PIPELINES = tuple(f"pipelining-{name}" for name in ("resnet50", "unet", "gpt2", "char_lm"))

SECTIONS = (
    Section(
        "peers",
        "Beside other libraries and loops by hand",
        "Two CPU devices on both sides.",
        (
            "small",
            "start",
            "sharding-stack: fully_shard by hand",
            "sharding-char_lm: fully_shard by hand",
            "pipelining-stack: torch.distributed.pipelining",
            "map: multiprocessing.Pool.imap",
        ),
    ),
    Section(
        "devices",
        "Two CPU devices",
        "*One core* is `single` on one CPU device; *all cores* is `single` with every thread. "
        "MobileNetV2 trains on images of 112 x 112, in batches of 32, with `channels_last`. "
        "[Compare](compare.md#two-comparisons) has batches of 256 without it.",
        (
            *("stack", "mobilenet", "parallel-stack", "parallel-mobilenet", "loss"),
            *("map: one process", "sparse", "experiment"),
        ),
    ),
    Section(
        "stages",
        "Pipelines and shards",
        "*Bound* is what the schedule allows: the rate of one core with as many micro-batches, "
        "times the simulated gain.",
        (
            *_PIPELINES,
            *("pipelining-stack: bound", "pipelining-stack: one core", "pipelining-product"),
            *("sharding-stack: ddp", "sharding-char_lm: ddp"),
        ),
    ),
    Section(
        "less",
        "Overhead, memory and interruptions",
        "Ratios of seconds, or of bytes at the peak: **less is better**.",
        (
            *("overhead", "checkpointing", "loss-memory", "pipelining-memory", "sharding-memory"),
            "surviving: copying that rank's part",
            "surviving: a cold start",
            "surviving: batch 10",
        ),
    ),
    Section(
        "",
        "Tools and checks",
        "Of percentages less is better.",
        (
            *("surviving: none", "compare", "partitioning-splits"),
            *("partitioning-predictions", "loss-check"),
        ),
    ),
)


def gpu_section(results: Results) -> Section:
    """Whatever is in gpu.json."""
    names = tuple(name for name in results if name.startswith("gpu/"))
    text = "Replicas and stages are two on the one card. Of bytes less is better."
    return Section("gpu", "What one GPU has shown", text, names)


# ---- the page ------------------------------------------------------------------------------------

INTRODUCTION = """\
# Performance

<!-- Written by `make performance` from benchmarks/results: change benchmarks/page.py. -->

What is compared takes turns in one run (A B C, A B C, ...), with the same settings. A ratio is the left side's rate
divided by the right side's: above 1 the left side is faster. It is the median over the rounds, with the lowest and the
highest; "–" is not recorded. [Benchmarks](../benchmarks/README.md) has what each measures, how to run it, and what is
known of missed goals. Each row links to its file. The code has changed since: *recorded* is the day.
"""

FIELDS = (
    *("processor", "cores", "memory", "accelerators", "system", "python", "torch", "lockstep"),
    *("lightning", "accelerate", "transformers"),
)


def written(results: Results, owed: str) -> dict[Path, str]:
    """Return the texts of the page and its charts, by their paths below docs/.

    Args:
        results: what the files hold.
        owed: the text of benchmarks/gpu-owed.md.
    """
    sections = [*SECTIONS, gpu_section(results)]
    texts = {
        Path("pictures", f"performance-{section.picture}.svg"): _chart(section, results)
        for section in sections
        if section.picture
    }
    parts = [INTRODUCTION, _goals(section.rows(results) for section in sections)]
    parts.append(_machines(results))
    parts += [_shown(section, results) for section in SECTIONS]
    parts += [_levels(results["level"]), _left_out()]
    parts += [_shown(sections[-1], results), _failed(results), _owed(owed)]
    texts[Path("performance.md")] = "\n".join(part for part in parts if part)
    return texts


def _goals(each: Iterable[list[Row]]) -> str:
    """How many goals are met."""
    found = [row for its in each for row in its if row.goal is not None]
    missed = sum(row.missed for row in found)
    return f"{len(found) - missed} of {len(found)} goals are met; {missed} are missed (bold).\n"


def _machines(results: Results) -> str:
    """What both machines are: a field that only some files have says so."""
    lines = ["## Machines\n", _table("", "CPU", "GPU")]
    kinds = [
        {
            result["file"]: result
            for name, result in results.items()
            if name.startswith("gpu/") == gpu
        }
        for gpu in (False, True)
    ]
    for field in FIELDS:
        cells = [
            _described([result["machine"].get(field) for result in files.values()])
            for files in kinds
        ]
        if any(cells):
            lines.append(_line(field, *cells))
    days = [sorted({result["recorded"] for result in files.values()}) for files in kinds]
    lines.append(_line("recorded", *(" to ".join(dict.fromkeys((d[0], d[-1]))) for d in days)))
    return _wide(lines)


def _described(values: Sequence[Any]) -> str:
    """The values of one field in several files; a kernel's local name is left out."""
    known = [re.sub(r"(Linux [\d.]+)-.*", r"\1", str(value)) for value in values if value]
    if not known:
        return ""
    text = ", ".join(sorted(set(known)))
    part = "" if len(known) == len(values) else f" ({len(known)} of {len(values)} files)"
    return text + part


def _shown(section: Section, results: Results) -> str:
    lines = [f"## {section.title}\n", section.text + "\n"]
    if section.picture:
        lines.append(
            f"![{section.title}: the ratios below](pictures/performance-{section.picture}.svg)\n"
        )
    table = [_table("measured", "left", "right", "ratio", "rounds", "goal", "recorded")]
    for row in section.rows(results):
        result = results[row.benchmark]
        table.append(
            _line(
                f"[{row.what}](../benchmarks/results/{result['file']})",
                *row.sides,
                _ratio(row),
                str(row.rounds or "–"),
                _goal(row),
                result["recorded"],
            )
        )
    return "\n".join([*lines, _wide(table)])


def _ratio(row: Row) -> str:
    low, high = (row.shown(value) for value in row.spread or (row.median, row.median))
    spread = "" if low == high else f" ({low}–{high})"
    return f"{row.shown(row.median)}{spread}"


def _goal(row: Row) -> str:
    if row.goal is None:
        return ""
    goal = row.shown(row.goal)
    return f"**{goal} missed**" if row.missed else goal


def _levels(result: Mapping[str, Any]) -> str:
    """The table of `level`: peaks of both devices, and the largest batch."""
    model, budget = result["model"], result["budget_bytes"] / 1e6
    lines = [
        f"[Balance](../benchmarks/results/level.json) of a classifier of {model['classes']:,} "
        f"classes, batches of {model['batch']} on two CPU devices; the largest batch within "
        f"{budget:.0f} MB each ({result['recorded']}):\n"
    ]
    table = [_table("way", "peak, MB", "largest batch")]
    for way, found in result["ways"].items():
        peaks = " and ".join(f"{size / 1e6:.0f}" for size in found["peak_bytes"].values())
        largest = found["largest_batch"]
        more = "at least " * (largest == result["largest_batch_tried"])
        table.append(_line(way, peaks, f"{more}{largest:,}"))
    return "\n".join([*lines, _wide(table)])


def _left_out() -> str:
    names = " and ".join(f"`{name}`" for name in NOT_RECORDED)
    return f"Not recorded in files: {names} ([numbers](../benchmarks/README.md)).\n"


def _failed(results: Results) -> str:
    lines = [f"- {name}: {kept['failed']}\n" for name, kept in results.items() if "failed" in kept]
    return "".join(lines)


def _owed(text: str) -> str:
    """The titles of what gpu-owed.md lists."""
    lines = [
        "## What is owed on GPUs\n",
        "Several GPUs have shown nothing yet ([details](../benchmarks/gpu-owed.md)):\n",
    ]
    return "\n".join([*lines, *(f"1. {title}" for title in titles(text))]) + "\n"


def titles(text: str) -> list[str]:
    """The bold words that begin each numbered item."""
    return re.findall(r"^\d+\. \*\*(.+?)\.?\*\*", text, re.MULTILINE)


def _chart(section: Section, results: Results) -> str:
    """Ratios in one direction: those in which less is better, or the others."""
    its = section.rows(results)
    bars = [
        Bar(
            f"{row.what.replace('`', '')} · {' : '.join(row.sides)}",
            row.shown(row.median),
            row.median,
            (row.spread[0], row.spread[1]),
            row.goal,
            row.missed,
        )
        for row in its
        if row.less == its[0].less
    ]
    return chart(section.title, bars)


def _table(*titles: str) -> str:
    return _line(*titles) + "\n" + _line(*("---" for _ in titles))


def _line(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def _wide(lines: Sequence[str]) -> str:
    """A table whose columns are as narrow as their words allow, by the site's style."""
    return "\n".join(['<div class="numbers" markdown>\n', *lines, "\n</div>\n"])


def main() -> int:
    """Write the page and its charts."""
    for path, text in written(read(), (HERE / "gpu-owed.md").read_text()).items():
        (DOCS / path).write_text(text)
        print(DOCS / path)
    return 0
