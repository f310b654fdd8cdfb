"""Verification: the answer of ``verify``, as a table for people and as plain values for programs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.launch.events import Caveat
from lockstep.verify.causes import named
from lockstep.verify.comparison import Comparison, Update, relative

_SHOWN = 4
"""Names of a list that are shown."""


@dataclass(frozen=True)
class Verification:
    """Whether a strategy gives one device's numbers. It is true where it does.

    Attributes:
        equal: whether nothing differs by more than rounding.
        job: what it is called.
        strategy: the one in question.
        devices: how many.
        precision: ``"float64"`` or ``"float32"``.
        bound: up to where a difference is rounding.
        batch_size: of the global batches that were used.
        noise: the largest difference of two runs of one device, where that was measured.
        comparison: every difference of every update; None where the strategy refused.
        refused: what the strategy said where it refused the job.
        first: the first update that differs.
        beyond: its differences that are more than rounding, as (kind, name, size), the largest first.
        evaluation_apart: values of the evaluation that differ.
        layer: name and class of the first layer that differs.
        causes: why, the likeliest first.
        notes: what was said before training, and what of the job was replaced.
        seconds: that all of it took.
    """

    equal: bool
    job: str
    strategy: str
    devices: int
    precision: str
    bound: float
    batch_size: int
    noise: float | None = None
    comparison: Comparison | None = None
    refused: str | None = None
    first: Update | None = None
    beyond: tuple[tuple[str, str, float], ...] = ()
    evaluation_apart: tuple[str, ...] = ()
    layer: tuple[str, str] | None = None
    causes: tuple[Caveat, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.equal

    @property
    def worst(self) -> float:
        """The largest difference of all; infinite where the strategy refused."""
        return math.inf if self.comparison is None else self.comparison.worst

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int = 100) -> list[str]:
        """The table, and what it means."""
        said = _wrapped(
            "",
            f"{self.job}: {self.strategy} on {self.devices} device{'s' if self.devices > 1 else ''} against single, "
            f"in {self.precision}, batches of {self.batch_size}",
            width,
        )
        for note in self.notes:
            said += _wrapped("note: ", note, width)
        if self.comparison is not None:
            evaluation = self.comparison.evaluation.items()
            words = [f"{name} {its:.6g} ({_size(relative(a, its))})" for name, (a, its) in evaluation]
            said += ["", *_table(self.comparison, width)]
            said += _wrapped("evaluation: ", "  ".join(words), width) if words else []
        said.append("")
        if self.equal:
            noise = "" if self.noise is None else f"; two runs of one device differ by {self.noise:.1e}"
            return [*said, *_wrapped("equal: ", f"nothing differs by more than {self.worst:.1e}{noise}", width)]
        said += self._where(width)
        for cause in self.causes:
            said += _wrapped(f"cause ({cause.kind}): ", cause.text, width)
            said += _wrapped("  fix: ", cause.fix, width)
        return said

    def _where(self, width: int) -> list[str]:
        if self.refused is not None:
            return _wrapped(f"not equal: {self.strategy} refuses this job: ", self.refused, width)
        if self.comparison is not None and self.comparison.start:
            return [f'not equal from the start: "{self.comparison.start[0]}" has other values']
        if self.first is None and self.comparison is not None and self.comparison.drifted:
            return [f'not equal between the ranks: "{self.comparison.drifted[0]}" has come to differ']
        if self.first is None:
            return [f"not equal in evaluation only: {', '.join(self.evaluation_apart)}"]
        said = [f"not equal from update {self.first.number} on (epoch {self.first.epoch}, batch {self.first.batch})"]
        if self.layer is not None:
            what = "backward begins to differ in" if self.layer[1] == "in backward" else "first layer that differs:"
            name = f'"{self.layer[0]}"' if self.layer[1] == "in backward" else named(*self.layer)
            said.append(f"{what} {name}")
        for kind in ("gradients", "parameters", "buffers"):
            most = [f'"{name}" {value:.1e}' for which, name, value in self.beyond if which == kind]
            if most:
                more = f", and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
                said += _wrapped(f"{kind}: ", ", ".join(most[:_SHOWN]) + more, width)
        return said

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {**asdict(self), "worst": self.worst}


_INESSENTIAL = {"epoch", "batch", "loss of single"}
"""Columns that a narrow terminal has no room for."""


def _table(comparison: Comparison, width: int) -> list[str]:
    heads = ("update", "epoch", "batch", "samples", "loss of single", "loss", "gradients", "parameters", "buffers")
    rows: list[tuple[str, ...]] = [heads]
    for update in comparison.updates:
        numbers = (update.number, update.epoch, update.batch, update.samples, f"{update.reference:.6g}")
        worst = [max(values.values(), default=None) for values in (update.gradients, update.parameters, update.buffers)]
        rows.append((*map(str, numbers), *map(_size, (update.losses_apart, *worst))))
    lines = _aligned(rows, "  ")
    if len(lines[0]) > width:
        lines = _aligned(rows, " ")
    if len(lines[0]) > width:
        kept = [i for i, head in enumerate(heads) if head not in _INESSENTIAL]
        lines = _aligned([tuple(row[i] for i in kept) for row in rows], "  ")
    return lines


def _aligned(rows: Sequence[Sequence[str]], between: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [between.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _size(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(head + text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
