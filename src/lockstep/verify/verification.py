"""Verification: the answer, as a table for people and as plain values for programs, and how it
is found.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable
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
from lockstep.verify.batch_cut import cause_of_cut, whole_against_cut, without_buffers
from lockstep.verify.cause_search import Diagnosis
from lockstep.verify.cause_texts import cause, named, of_refusal
from lockstep.verify.comparison import Bounds, Comparison, Experiment, Update
from lockstep.verify.experiments import Laboratory, Noise
from lockstep.verify.measures import relative
from lockstep.verify.preflight import preflight

_WITHOUT_DROPOUT = (
    "dropout is switched off on both sides, since its masks differ between strategies"
)

_SHOWN = 4
"""Names of a list that are shown."""

_WIDE = 90
"""Columns of a terminal that the table needs; with fewer, less lies between its columns."""

_NARROW = 80
"""With fewer columns the table leaves out what is inessential."""

_INESSENTIAL = {"epoch", "batch", "loss of single"}
_KINDS = ("gradients", "parameters", "buffers")
_HEADS = ("update", "epoch", "batch", "samples", "loss of single", "   loss", *_KINDS)


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
        batch_size: of the global batches that were used.
        noise: the largest difference of two runs of one device, where that was measured.
        comparison: every difference of every update; None where the strategy refused.
        whole: ``single`` in the strategy's micro-batches against ``single`` on whole batches, where
            there are some.
        refused: the error's text where the strategy refused the job.
        first: the first update that differs.
        beyond: its differences that are more than rounding, as (kind, name, size), the largest
            first.
        evaluation_apart: values of the evaluation that differ.
        layer: name and class of the first layer that differs.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {**asdict(self), "worst": self.worst}

    def lines(self, width: int = 100) -> list[str]:
        """The table, and what it means."""
        lines = _wrapped(
            f"{self.job}: {self.strategy} on {self.devices} device{'s' if self.devices > 1 else ''} against single, "
            f"in {self.precision}, batches of {self.batch_size}",
            width,
        )
        for note in self.notes:
            lines += _wrapped(f"note: {note}", width)
        if self.comparison is not None:
            lines += ["", *_table(self.comparison, width)]
            lines += _evaluation(self.comparison, width)
        lines.append("")
        if self.equal:
            return lines + _wrapped(self._how_equal(), width)
        lines += self._where(width)
        for found in self.causes:
            lines += _wrapped(f"cause ({found.kind}): {found.text}", width)
            lines += _wrapped(f"  fix: {found.fix}", width)
        return lines

    def _how_equal(self) -> str:
        text = f"equal: nothing differs by more than {self.worst:.1e}"
        if self.noise is not None:
            text += f"; two runs of one device differ by {self.noise:.1e}"
        if self.whole is not None:
            text += f"; whole batches give the same, up to {self.whole.worst:.1e}"
        return text

    def _where(self, width: int) -> list[str]:
        found, first = self.comparison, self.first
        if found is None:
            return _wrapped(f"not equal: {self.strategy} refuses this job: {self.refused}", width)
        if found.start:
            return [f'not equal from the start: "{found.start[0]}" has other values']
        if first is None and found.drifted:
            return [f'not equal between the ranks: "{found.drifted[0]}" has come to differ']
        if first is None:
            return [f"not equal in evaluation only: {', '.join(self.evaluation_apart)}"]
        what = "not equal" if self.whole is None else "not equal to the whole batch"
        where = f"(epoch {first.epoch}, batch {first.batch})"
        lines = [f"{what} from update {first.number} on {where}"]
        if self.layer is not None:
            name, kind = self.layer
            is_backward = kind == "in backward"
            lines.append(
                f'backward begins to differ in "{name}"'
                if is_backward
                else f"first layer that differs: {named(name, kind)}"
            )
        for kind in _KINDS:
            apart = [f'"{name}" {value:.1e}' for which, name, value in self.beyond if which == kind]
            more = f", and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
            if apart:
                lines += _wrapped(f"{kind}: {', '.join(apart[:_SHOWN])}{more}", width)
        return lines


def _table(comparison: Comparison, width: int) -> list[str]:
    rows: list[tuple[object, ...]] = [_HEADS]
    for update in comparison.updates:
        numbers = update.number, update.epoch, update.batch, update.samples
        worst = [max(getattr(update, kind).values(), default=None) for kind in _KINDS]
        sizes = map(_size, (update.losses_apart, *worst))
        rows.append((*numbers, f"{update.reference:.6g}", *sizes))
    between = "  " if width >= _WIDE else " "
    lines = []
    for row in rows:
        cells = [
            str(cell).rjust(len(head))
            for head, cell in zip(_HEADS, row, strict=True)
            if width >= _NARROW or head not in _INESSENTIAL
        ]
        lines.append(between.join(cells))
    return lines


def _evaluation(comparison: Comparison, width: int) -> list[str]:
    words = [
        f"{name} {its:.6g} ({_size(relative(mine, its))})"
        for name, (mine, its) in comparison.evaluation.items()
    ]
    return _wrapped(f"evaluation: {'  '.join(words)}", width) if words else []


def _size(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def verify(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    whole: bool = False,
    **settings: Any,
) -> Verification:
    """Compare a strategy with one device: the same results, or where they differ, and why.

    ::

        def test_ddp_trains_my_model_as_one_device_does():
            found = lockstep.verify(job, strategy="ddp", devices=2)
            assert found, str(found)

    Both sides begin with the same weights and go through the same batches: the first two, the
    smaller last one of the epoch, up to three whose targets differ in kind (a mask, a rare class,
    NaN), two of the second epoch, and an evaluation of a few batches of each set. They compute in
    float64 where the model can; else rounding is measured, by two runs of ``single`` whose sums are
    taken in other orders. Dropout is switched off on both sides where its masks would differ, and a
    note is logged. Micro-batches are compared with whole batches, too.

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
    is_single = strategy in ("single", Single())
    chosen = _devices.parse(devices) if is_single else _devices.parse_several(devices)
    if strategy is None and len(chosen) == 1:
        raise InputError(
            "verify: name a strategy to hold against one device, and its devices (--strategy ddp "
            "--devices 2)"
        )
    loaded = the_job(source)
    planned = _planned(choose(strategy, chosen), loaded, chosen)
    with Laboratory(planned, chosen) as laboratory:
        search = _Search(source, loaded, planned, chosen, laboratory)
        found = search.answer(whole=whole)
    return replace(found, seconds=time.perf_counter() - began)


def _planned(strategy: Strategy, job: Job, devices: tuple[Device, ...]) -> Strategy:
    """The strategy, with what it leaves open settled as in a training, once for all experiments."""
    each = len(devices) if needs_one_process(strategy, devices) else strategy.devices_per_rank
    if each == 1:
        return strategy
    with alone(devices[:each]) as world:
        world.tell = lambda told: None
        data = resolve(job.train_data, world, "train_data")
        return strategy.planned(job.replace(train_data=data), world)


@dataclass(frozen=True)
class _Search:
    """How the answer is found."""

    source: Job | JobFile
    job: Job
    strategy: Strategy
    devices: tuple[Device, ...]
    laboratory: Laboratory

    def answer(self, *, whole: bool) -> Verification:
        experiment, notes = preflight(
            self.source, self.job, self.strategy, self.devices, whole=whole
        )
        noise = Noise(self.laboratory, experiment)
        answer = Verification(
            equal=False,
            job=self.source.name if isinstance(self.source, JobFile) else "job",
            strategy=self.strategy.name,
            devices=len(self.devices),
            precision="float64" if experiment.settings["precision"] == "fp64" else "float32",
            bound=noise.least,
            batch_size=experiment.loaded.batch_size,
            notes=tuple(notes),
        )
        try:
            # Where the sides differ, it is in the first update mostly.
            found = self.laboratory.compared(experiment.but(watched=1, checked=True))
        except Exception as error:
            refusal = of_refusal(error)
            if refusal is None:
                raise
            if refusal.kind in ("failed", "refused"):
                if "batch_size" in experiment.settings:  # a share may be too small for it
                    return self.answer(whole=True)
                # Does one device refuse it, too?
                self.laboratory.compared(experiment.of_single(cut=None))
            return replace(answer, refused=str(error), causes=(refusal,))
        if "dropout" in found.still and (found.drops or not found.drew):
            notes.append(_WITHOUT_DROPOUT)
        notes += map(str, found.notes)
        equal = noise.hold(found)
        measured = noise.bounds(found).noise
        answer = replace(
            answer,
            equal=equal,
            noise=None if measured is None else measured.worst,
            comparison=found,
            notes=tuple(notes),
        )
        if equal:
            return self._with_whole_batches(answer, experiment, found, noise)
        diagnosis = Diagnosis(self.laboratory, experiment, found, noise)
        bounds = diagnosis.bounds
        return replace(
            answer,
            first=diagnosis.first,
            beyond=_beyond(bounds, diagnosis.first),
            evaluation_apart=tuple(bounds.evaluation_apart(found)),
            causes=tuple(diagnosis.causes()),
            layer=diagnosis.first_layer(),
        )

    def _with_whole_batches(
        self, answer: Verification, experiment: Experiment, found: Comparison, noise: Noise
    ) -> Verification:
        """The answer, once micro-batches are compared with whole batches."""
        cut = whole_against_cut(experiment, found)
        if cut is None:
            return answer
        tried = without_buffers(self.laboratory.compared(cut))
        if tried.drew:  # numbers that can't be taken out
            return answer
        answer = replace(answer, whole=tried)
        if noise.hold(tried):
            return answer
        bounds = noise.bounds(tried)
        first = bounds.first_apart(tried)
        if first is not None and first.number > 1:  # whose layers nobody has looked at
            cut = cut.but(watched=first.number)
            tried = without_buffers(self.laboratory.compared(cut))
        why = cause_of_cut(self.laboratory, cut, tried, bounds, tried)
        return replace(
            answer,
            equal=False,
            first=first,
            beyond=_beyond(bounds, first),
            layer=tried.layer,
            causes=(cause("cut", parts=experiment.parts, apart=tried.worst), why),
        )


def _beyond(bounds: Bounds, update: Update | None) -> tuple[tuple[str, str, float], ...]:
    """The differences of an update that are more than rounding, the largest first."""
    if update is None:
        return ()
    return tuple(sorted(bounds.beyond(update), key=lambda number: -number[2]))
