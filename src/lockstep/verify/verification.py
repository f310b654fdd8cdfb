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
from lockstep.verify.comparison import Bounds, Comparison, Difference, Experiment, Update
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
            f"in {self.precision}, batches of {self.batch_size}"
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
        if self.noise is not None:
            text += f"; two runs of one device differ by {self.noise:.1e}"
        if self.whole is not None:
            text += f"; whole batches give the same, up to {self.whole.worst:.1e}"
        return text

    def _where(self) -> list[str]:
        """Return where the sides differ first, and by how much."""
        found = self.comparison
        first = self.first
        if found is None:
            return [f"not equal: {self.strategy} refuses this job: {self.refused}"]
        if found.start:
            return [f'not equal from the start: "{found.start[0]}" has other values']
        if first is None and found.drifted:
            return [f'not equal between the ranks: "{found.drifted[0]}" has come to differ']
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
    rows: list[tuple[object, ...]] = [_HEADS]

    for update in comparison.updates:
        rows.append(
            (
                update.number,
                update.epoch,
                update.batch,
                update.samples,
                f"{update.reference:.6g}",
                _size(update.losses_apart),
                _largest(update.gradients),
                _largest(update.parameters),
                _largest(update.buffers),
            )
        )

    between = "  " if width >= _WIDE else " "
    lines = []
    for row in rows:
        cells = []
        for head, cell in zip(_HEADS, row, strict=True):
            if width >= _NARROW or head not in _INESSENTIAL:
                cells.append(str(cell).rjust(len(head)))
        lines.append(between.join(cells))

    return lines


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
    smaller last one of the epoch, two of the second epoch, and an evaluation of a few batches of
    each set. They compute in float64 where the model can; else rounding is measured, by two runs of
    ``single`` whose sums are taken in other orders. Dropout is switched off on both sides where its
    masks would differ, and a note is logged. Micro-batches are compared with whole batches, too.

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
    parse = _devices.parse if is_single else _devices.parse_several
    chosen = parse(devices)
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
    """Return the strategy with what it leaves open settled, once for all experiments."""
    each = strategy.devices_per_rank
    if needs_one_process(strategy, devices):
        each = len(devices)
    if each == 1:
        return strategy

    with alone(devices[:each]) as world:
        world.tell = lambda event: None
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
        """Compare the strategy with one device, and find causes where they differ."""
        experiment, notes = preflight(
            self.source, self.job, self.strategy, self.devices, whole=whole
        )
        noise = Noise(self.laboratory, experiment)
        is_exact = experiment.settings["precision"] == "fp64"
        answer = Verification(
            equal=False,
            job=self.source.name if isinstance(self.source, JobFile) else "job",
            strategy=self.strategy.name,
            devices=len(self.devices),
            precision="float64" if is_exact else "float32",
            bound=noise.least,
            batch_size=experiment.loaded.batch_size,
            notes=tuple(notes),
        )

        try:
            # Where the sides differ, it is in the first update mostly.
            found = self.laboratory.compared(experiment.but(watched=1, checked=True))
        except Exception as error:
            return self._of_error(answer, experiment, error)

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
            return self._with_whole_batches(answer, experiment, noise)

        diagnosis = Diagnosis(self.laboratory, experiment, found, noise)
        return replace(
            answer,
            first=diagnosis.first,
            beyond=_beyond(diagnosis.bounds, diagnosis.first),
            evaluation_apart=tuple(diagnosis.bounds.evaluation_apart(found)),
            causes=tuple(diagnosis.causes()),
            layer=diagnosis.first_layer(),
        )

    def _of_error(
        self, answer: Verification, experiment: Experiment, error: Exception
    ) -> Verification:
        """Return the answer where the strategy refuses the job, or fails.

        Raises:
            Exception: the error has another reason than the job, or one device raises one, too.
        """
        refusal = of_refusal(error)
        if refusal is None:
            raise error
        if refusal.kind in ("failed", "refused"):
            if "batch_size" in experiment.settings:  # a share may be too small for it
                return self.answer(whole=True)
            # Does one device refuse it, too?
            self.laboratory.compared(experiment.of_single(cut=None))

        return replace(answer, refused=str(error), causes=(refusal,))

    def _with_whole_batches(
        self, answer: Verification, experiment: Experiment, noise: Noise
    ) -> Verification:
        """Return the answer, once micro-batches are compared with whole batches."""
        assert answer.comparison is not None
        cut = whole_against_cut(experiment, answer.comparison)
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
        if first is not None and first.number > 1:  # nobody has looked at its layers
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


def _beyond(bounds: Bounds, update: Update | None) -> tuple[Difference, ...]:
    """Return the differences of an update that are more than rounding, the largest first."""
    if update is None:
        return ()
    found = sorted(bounds.beyond(update), key=lambda number: -number[2])
    return tuple(found)
