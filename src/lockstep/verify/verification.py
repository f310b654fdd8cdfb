"""Verification: the answer, as a table for people and as plain values for programs."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.report.table import Table
from lockstep.run.events import Caveat
from lockstep.verify.cause_texts import named
from lockstep.verify.comparison import Comparison, Difference, Update
from lockstep.verify.determinism import Thing
from lockstep.verify.measures import relative

_SHOWN = 4
"""Names of a list that are shown."""

_NARROW = 80
"""With fewer columns the table leaves out what is inessential."""

_INESSENTIAL = {"epoch", "batch", "loss of single"}
_STILL: dict[Thing, str] = {
    "norms": "BatchNorm, which normalizes over a micro-batch",
    "draws": "random numbers such as dropout's masks, which each micro-batch draws for itself",
}
"""What is taken out of the comparison with whole batches, and how micro-batches differ in it."""

_KINDS = ("gradients", "parameters", "buffers")
_HEADS = ("update", "epoch", "batch", "samples", "loss of single", "loss", *_KINDS)


@dataclass(frozen=True)
class Verification:
    """Whether a strategy gives one device's numbers. It is true where it does.

    Attributes:
        equal: whether nothing differs by more than rounding.
        job: the job's name.
        strategy: the strategy's name.
        devices: how many.
        precision: ``"float64"`` or ``"float32"``.
        bound: up to where a difference is rounding.
        batch_size: of the global batches that were used; None where the job lists them.
        noise: the largest difference of two runs of one device, where that was measured.
        micro_batches: in which one device was given each batch.
        comparison: every difference of every update; None where the strategy refused.
        whole: ``single`` in the strategy's micro-batches against ``single`` on whole batches, where
            there are some.
        refused: the error's text where the strategy refused the job.
        first: the first update that differs.
        beyond: its differences that are more than rounding, as (kind, name, size), the largest
            first.
        evaluation_apart: values of the evaluation that differ.
        layer: name and class of the first layer that differs, in the first update or where whole
            batches differ.
        causes: why, the likeliest first.
        notes: what was logged before training, and what of the job was replaced.
        seconds: that all of it took.
    """

    equal: bool
    job: str
    strategy: str
    devices: int
    precision: str
    bound: float
    batch_size: int | None
    noise: float | None = None
    micro_batches: int = 1
    comparison: Comparison | None = None
    whole: Comparison | None = None
    refused: str | None = None
    first: Update | None = None
    beyond: tuple[Difference, ...] = ()
    evaluation_apart: tuple[str, ...] = ()
    layer: tuple[str, str] | None = None
    causes: tuple[Caveat, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.equal

    @property
    def worst(self) -> float:
        """Return the largest difference of all; infinite where the strategy refused."""
        if self.comparison is None:
            return math.inf
        return self.comparison.worst

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return {**asdict(self), "worst": self.worst}

    def lines(self, width: int = 100) -> list[str]:
        """Return the table, and what it means."""
        devices = "device" if self.devices == 1 else "devices"
        texts = [
            f"{self.job}: {self.strategy} on {self.devices} {devices} against single, "
            f"in {self.precision}, batches of {self.batch_size or 'the job'}"
        ]
        texts += [f"note: {note}" for note in self.notes]
        if self.comparison is not None:
            texts += ["", *_table(self.comparison, width)]
            texts += _evaluation(self.comparison)

        texts.append("")

        if self.equal:
            texts.append(self._how_equal())
        else:
            texts += self._where()

        for found in self.causes:
            texts.append(f"cause ({found.kind}): {found.text}")
            texts.append(f"  fix: {found.fix}")

        lines = []
        for text in texts:
            lines += _wrapped(text, width)
        return lines

    def _how_equal(self) -> str:
        """Return how near the two are."""
        text = f"equal: nothing differs by more than {self.worst:.1e}"
        if self.micro_batches > 1:
            text += f" from single in {self.micro_batches} micro-batches"
        if self.noise is not None:
            text += f"; two runs of one device differ by {self.noise:.1e}"
        if self.whole is not None:
            text += f"; whole batches give the same, up to {self.whole.worst:.1e}"
            known = [f"for {_STILL[thing]}" for thing in _STILL if thing in self.whole.still]
            if known:
                text += f", but {', and '.join(known)}"
        return text

    def _where(self) -> list[str]:
        """Return where the sides differ first, and by how much."""
        found = self.comparison
        first = self.first
        if found is None:
            return [f"not equal: {self.strategy} refuses this job: {self.refused}"]
        if first is None and found.drifted:
            return [f'not equal between the ranks: "{found.drifted}" has come to differ']
        if first is None:
            return [f"not equal in evaluation only: {', '.join(self.evaluation_apart)}"]

        what = "not equal" if self.whole is None else "not equal to the whole batch"
        where = f"(epoch {first.epoch}, batch {first.batch})"
        texts = [f"{what} from update {first.number} on {where}"]
        if self.layer is not None:
            texts.append(f"first layer that differs: {named(*self.layer)}")

        for kind in _KINDS:
            apart = [f'"{name}" {value:.1e}' for of, name, value in self.beyond if of == kind]
            shown = ", ".join(apart[:_SHOWN])
            if len(apart) > _SHOWN:
                shown += f", and {len(apart) - _SHOWN} more"
            if apart:
                texts.append(f"{kind}: {shown}")

        return texts


def _table(comparison: Comparison, width: int) -> list[str]:
    """Return a line for each update, below the heads."""
    head = list(_HEADS)
    if width < _NARROW:
        head = [name for name in head if name not in _INESSENTIAL]
    rows = []
    for update in comparison.updates:
        cells = {
            "update": f"{update.number:>6}",
            "epoch": str(update.epoch),
            "batch": str(update.batch),
            "samples": str(update.samples),
            "loss of single": f"{update.reference:.6g}",
            "loss": _size(update.losses_apart),
            "gradients": _largest(update.gradients),
            "parameters": _largest(update.parameters),
            "buffers": _largest(update.buffers),
        }
        rows.append([cells[name] for name in head])
    return Table(head, rows).lines(width)


def _evaluation(comparison: Comparison) -> list[str]:
    """Return a line with the values of the evaluation, where there are some."""
    words = []
    for name, (mine, its) in comparison.evaluation.items():
        words.append(f"{name} {its:.6g} ({_size(relative(mine, its))})")
    return [f"evaluation: {'  '.join(words)}"] if words else []


def _largest(apart: dict[str, float]) -> str:
    return _size(max(apart.values())) if apart else "-"


def _size(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines."""
    if len(text) <= width:  # a line of the table, say, whose spaces stay
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
