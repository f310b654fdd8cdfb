"""Verdict: how the answer is found, by one experiment where the sides are equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.data import resolve
from lockstep.errors import DeviceError, InputError
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.launch.placement import alone, needs_one_process
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.strategies.single import Single
from lockstep.verify.batch_cut import cause_of_cut, whole_against_cut, without_buffers
from lockstep.verify.cause_search import Diagnosis
from lockstep.verify.cause_texts import cause, of_refusal
from lockstep.verify.comparison import Bounds, Difference, Experiment, Update
from lockstep.verify.experiments import Noise, compared
from lockstep.verify.preflight import preflight
from lockstep.verify.verification import Verification

_WITHOUT_DROPOUT = (
    "dropout is switched off on both sides, since its masks differ between strategies"
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
    masks would differ, and a note names that. Micro-batches are compared with whole batches, too.

    Args:
        job: as in ``train``.
        strategy: as in ``train``; one of your own is a ``Strategy``.
        devices: as in ``train``, but ``auto`` without an accelerator is a CPU device for each core.
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
    source = with_settings(as_job(job), settings, verify)

    devices = devices_for(strategy, devices)
    is_single = strategy in ("single", Single())
    parse = _devices.parse if is_single else _devices.parse_several
    chosen = parse(devices)
    if strategy is None and len(chosen) == 1:
        raise InputError(
            "verify: name a strategy to compare with one device, and its devices (--strategy ddp "
            "--devices 2)"
        )

    loaded = the_job(source)
    planned = _planned(choose(strategy, chosen), loaded, chosen)
    found = _Search(source, loaded, planned, chosen).answer(whole=whole)

    return replace(found, seconds=time.perf_counter() - began)


def _planned(strategy: Strategy, job: Job, devices: tuple[Device, ...]) -> Strategy:
    """Return the strategy with what it leaves open settled, once for all experiments."""
    each = strategy.devices_per_rank
    if needs_one_process(strategy, devices):
        each = len(devices)
    if each == 1:  # nothing is left open
        return strategy

    with alone(devices[:each]) as world:
        world.emit = lambda event: None
        data = resolve(job.train_data, world, "train_data")
        return strategy.planned(job.replace(train_data=data), world)


@dataclass(frozen=True)
class _Search:
    """How the answer is found.

    Attributes:
        source: the job, as ranks load it.
        job: the same, loaded.
        strategy: that is compared with one device.
        devices: those of the strategy.
    """

    source: Job | JobFile
    job: Job
    strategy: Strategy
    devices: tuple[Device, ...]

    def answer(self, *, whole: bool) -> Verification:
        """Compare the strategy with one device, and find causes where they differ."""
        experiment, notes = preflight(
            self.source, self.job, self.strategy, self.devices, whole=whole
        )
        noise = Noise(experiment)
        is_exact = experiment.settings["precision"] == "fp64"
        answer = Verification(
            equal=False,
            job=self.source.name if isinstance(self.source, JobFile) else "job",
            strategy=self.strategy.name,
            devices=len(self.devices),
            precision="float64" if is_exact else "float32",
            bound=noise.least,
            batch_size=None if self.job.batches else experiment.loaded.batch_size,
            micro_batches=experiment.parts,
            notes=tuple(notes),
        )

        try:
            # Where the sides differ, it is in the first update mostly.
            found = compared(experiment.but(watched=1, checked=True))
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

        diagnosis = Diagnosis(experiment, found, noise)
        first = diagnosis.first
        return replace(
            answer,
            first=first,
            beyond=_beyond(diagnosis.bounds, first),
            evaluation_apart=tuple(diagnosis.bounds.evaluation_apart(found)),
            causes=tuple(diagnosis.causes()),
            layer=found.layer if first is not None and first.number == 1 else None,
        )

    def _of_error(
        self, answer: Verification, experiment: Experiment, error: Exception
    ) -> Verification:
        """Return the answer where the strategy refuses the job, or fails.

        Args:
            answer: without a comparison.
            experiment: what was tried.
            error: what it raised.

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
            compared(experiment.of_single(cut=None))

        return replace(answer, refused=str(error), causes=(refusal,))

    def _with_whole_batches(
        self, answer: Verification, experiment: Experiment, noise: Noise
    ) -> Verification:
        """Return the answer, once micro-batches are compared with whole batches.

        Args:
            answer: the strategy gives the numbers of one device with as many micro-batches.
            experiment: what showed that.
            noise: up to where a difference is rounding.
        """
        assert answer.comparison is not None
        cut = whole_against_cut(experiment, answer.comparison)
        if cut is None:
            return answer
        tried = without_buffers(compared(cut))
        if tried.drew:  # numbers that can't be taken out
            return answer
        answer = replace(answer, whole=tried)
        if noise.hold(tried):
            return answer

        bounds = noise.bounds(tried)
        first = bounds.first_apart(tried)
        if first is not None and first.number > 1:  # nobody has looked at its layers
            cut = cut.but(watched=first.number)
            tried = without_buffers(compared(cut))

        why = cause_of_cut(tried, bounds)
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
