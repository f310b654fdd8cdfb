"""Verification: the answer, as a table for people and as plain values for programs, and how it
is found.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.data import resolve
from lockstep.errors import DeviceError, InputError
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.launch.events import Caveat
from lockstep.launch.placement import alone, needs_one_process
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.strategies.single import Single
from lockstep.verify.batch_cut import causes_of_cut, compared_with_whole
from lockstep.verify.cause_search import Diagnosis
from lockstep.verify.cause_texts import named, of_refusal
from lockstep.verify.comparison import Bounds, Comparison, Update
from lockstep.verify.experiments import Laboratory, Noise
from lockstep.verify.measures import relative
from lockstep.verify.preflight import preflight

_WITHOUT_DROPOUT = (
    "dropout is switched off on both sides, since its masks differ between strategies"
)

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
        whole: ``single`` in the strategy's micro-batches against ``single`` on whole batches, where
            there are some.
        refused: what the strategy said where it refused the job.
        first: the first update that differs.
        beyond: its differences that are more than rounding, as (kind, name, size), the largest
            first.
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
    whole: Comparison | None = None
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
            f"{self.job}: {self.strategy} on {self.devices} "
            f"device{'s' if self.devices > 1 else ''} against single, "
            f"in {self.precision}, batches of {self.batch_size}",
            width,
        )
        for note in self.notes:
            said += _wrapped("note: ", note, width)
        if self.comparison is not None:
            evaluation = self.comparison.evaluation.items()
            words = [
                f"{name} {its:.6g} ({_size(relative(a, its))})" for name, (a, its) in evaluation
            ]
            said += ["", *_table(self.comparison, width)]
            said += _wrapped("evaluation: ", "  ".join(words), width) if words else []
        said.append("")
        if self.equal:
            noise = (
                "" if self.noise is None else f"; two runs of one device differ by {self.noise:.1e}"
            )
            text = f"nothing differs by more than {self.worst:.1e}{noise}"
            if self.whole is not None:
                text += f"; whole batches give the same, up to {self.whole.worst:.1e}"
            return [*said, *_wrapped("equal: ", text, width)]
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
            return [
                f'not equal between the ranks: "{self.comparison.drifted[0]}" has come to differ'
            ]
        if self.first is None:
            return [f"not equal in evaluation only: {', '.join(self.evaluation_apart)}"]
        what = "not equal" if self.whole is None else "not equal to the whole batch"
        said = [
            f"{what} from update {self.first.number} on (epoch {self.first.epoch}, batch "
            f"{self.first.batch})"
        ]
        if self.layer is not None:
            what = (
                "backward begins to differ in"
                if self.layer[1] == "in backward"
                else "first layer that differs:"
            )
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
    heads = (
        "update",
        "epoch",
        "batch",
        "samples",
        "loss of single",
        "loss",
        "gradients",
        "parameters",
        "buffers",
    )
    rows: list[tuple[str, ...]] = [heads]
    for update in comparison.updates:
        numbers = (
            update.number,
            update.epoch,
            update.batch,
            update.samples,
            f"{update.reference:.6g}",
        )
        worst = [
            max(values.values(), default=None)
            for values in (update.gradients, update.parameters, update.buffers)
        ]
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
    return [
        between.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _size(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        head + text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def verify(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    whole: bool = False,
    **settings: Any,
) -> Verification:
    """Hold a strategy against one device: the same results, or where they part, and why.

    ::

        def test_ddp_trains_my_model_as_one_device_does():
            found = lockstep.verify(job, strategy="ddp", devices=2)
            assert found, str(found)

    Both sides begin with the same weights and go through the same batches: the first two, the
    smaller last one of the epoch, up to three whose targets differ in kind (a mask, a rare class,
    NaN), two of the second epoch, and an evaluation of a few batches of each set. They compute in
    float64 where the model can; else rounding is measured, by two runs of ``single`` whose sums are
    taken in other orders. Dropout is switched off on both sides where its masks would differ, which
    a note says.

    Args:
        job: as in ``train``.
        strategy: as in ``train``; one of your own is a ``Strategy``.
        devices: as in ``train``, but ``auto`` without an accelerator is a slot for each core.
        whole: take the job's own batch size, however long its batches take.
        settings: fields of the job to replace.

    Returns:
        What was found; it is true where the two are equal, and printing it gives the table.

    Raises:
        InputError: something asked for can't be done, or ``single`` can't train the job.
        Exception: what the job's own code raises under ``single``.
    """
    if started_as_rank():
        raise DeviceError(
            "verify starts processes of its own on one machine: start it without torchrun"
        )
    began = time.perf_counter()
    source = with_settings(as_job(job), settings)
    devices = devices_for(strategy, devices)
    chosen = (
        _devices.parse(devices)
        if strategy in ("single", Single())
        else _devices.parse_several(devices)
    )
    if strategy is None and len(chosen) == 1:
        raise InputError(
            "verify: name a strategy to hold against one device, and its devices (--strategy ddp "
            "--devices 2)"
        )
    loaded = the_job(source)
    way = choose(strategy, chosen)
    each = len(chosen) if needs_one_process(way, chosen) else way.devices_per_rank
    if each > 1:  # what it leaves open is settled as in a training, once for all experiments
        with alone(chosen[:each]) as world:
            world.tell = lambda told: None
            way = way.planned(
                loaded.replace(train_data=resolve(loaded.train_data, world, "train_data")), world
            )
    with Laboratory(way, chosen) as laboratory:
        said = _answer(source, loaded, way, chosen, laboratory, whole=whole)
    return replace(said, seconds=time.perf_counter() - began)


def _answer(
    source: Job | JobFile,
    loaded: Job,
    way: Strategy,
    chosen: tuple[Device, ...],
    laboratory: Laboratory,
    *,
    whole: bool,
) -> Verification:
    experiment, notes = preflight(source, loaded, way, chosen, whole=whole)
    used = loaded.replace(**experiment.settings)
    noise = Noise(laboratory, experiment)
    said = Verification(
        equal=False,
        job=source.name if isinstance(source, JobFile) else "job",
        strategy=way.name,
        devices=len(chosen),
        precision="float64" if used.precision == "fp64" else "float32",
        bound=noise.least,
        batch_size=used.batch_size,
        notes=tuple(notes),
    )
    try:
        found = laboratory.compared(
            experiment.but(watched=1)
        )  # where they part it is in the first update mostly
    except Exception as error:
        cause = of_refusal(error)
        if cause is None:
            raise
        if cause.kind in ("failed", "refused"):
            if "batch_size" in experiment.settings:  # a share may be too small for it
                return _answer(source, loaded, way, chosen, laboratory, whole=True)
            laboratory.compared(experiment.of_single(cut=None))  # does one device say it too?
        return replace(said, refused=str(error), causes=(cause,))
    if "dropout" in found.still and (found.drops or not found.drew):
        said = replace(said, notes=(*said.notes, _WITHOUT_DROPOUT))
    equal = noise.hold(found)
    bounds = noise.bounds(found)
    said = replace(
        said,
        equal=equal,
        noise=bounds.noise.worst if bounds.noise is not None else None,
        comparison=found,
        notes=(*said.notes, *map(str, found.notes)),
    )
    if equal:
        uncut = compared_with_whole(laboratory, experiment, found)
        said = replace(said, whole=uncut)
        if uncut is None or noise.hold(uncut):
            return said
        bounds = noise.bounds(uncut)
        first = bounds.first_apart(uncut)
        return replace(
            said,
            equal=False,
            first=first,
            beyond=_largest_first(bounds, first),
            layer=uncut.layer,
            causes=causes_of_cut(uncut, bounds, experiment.parts),
        )
    diagnosis = Diagnosis(laboratory, experiment, found, noise)
    first = diagnosis.first
    return replace(
        said,
        first=first,
        beyond=_largest_first(bounds, first),
        evaluation_apart=tuple(bounds.evaluation_apart(found)),
        causes=tuple(diagnosis.causes()),
        layer=diagnosis.first_layer(),
    )


def _largest_first(bounds: Bounds, first: Update | None) -> tuple[tuple[str, str, float], ...]:
    if first is None:
        return ()
    return tuple(sorted(bounds.beyond(first), key=lambda one: -one[2]))
