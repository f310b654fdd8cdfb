"""The answer: preflight, both sides, the bounds, and the causes where they part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
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
from lockstep.strategies import Strategy, choose
from lockstep.strategies.single import Single
from lockstep.verify.causes import of_refusal
from lockstep.verify.diagnosis import Diagnosis
from lockstep.verify.experiments import Laboratory
from lockstep.verify.preflight import preflight
from lockstep.verify.rounding_noise import Noise
from lockstep.verify.verification import Verification


def verify(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    whole: bool = False,
    **settings: Any,
) -> Verification:
    """Hold a strategy against one device: the same numbers, or where they part, and why.

    ::

        def test_ddp_trains_my_model_as_one_device_does():
            found = lockstep.verify(job, strategy="ddp", devices=2)
            assert found, str(found)

    Both sides begin with the same weights and go through the same batches: the first two, the smaller last one of the
    epoch, up to three whose targets differ in kind (a mask, a rare class, NaN), two of the second epoch, and an
    evaluation of a few batches of each set. They compute in float64 where the
    model can; else rounding is measured, by two runs of ``single`` whose sums are taken in other orders.

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
        raise DeviceError("verify starts processes of its own on one machine: start it without torchrun")
    began = time.perf_counter()
    source = with_settings(as_job(job), settings)
    chosen = _devices.parse(devices) if strategy in ("single", Single()) else _devices.parse_several(devices)
    if strategy is None and len(chosen) == 1:
        raise InputError(
            "verify: name a strategy to hold against one device, and its devices (--strategy ddp --devices 2)"
        )
    loaded = the_job(source)
    way = _planned(choose(strategy, chosen), loaded, chosen)
    with Laboratory(way, chosen) as laboratory:
        said = _answer(source, loaded, way, chosen, laboratory, whole=whole)
    return dataclasses.replace(said, seconds=time.perf_counter() - began)


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
        found = laboratory.compared(experiment.but(watched=1))  # where they part it is in the first update mostly
    except Exception as error:
        cause = of_refusal(error)
        if cause is None:
            raise
        if cause.kind in ("failed", "refused"):
            if "batch_size" in experiment.settings:  # a share may be too small for it
                return _answer(source, loaded, way, chosen, laboratory, whole=True)
            laboratory.compared(experiment.of_single(cut=None))  # does one device say it too?
        return dataclasses.replace(said, refused=str(error), causes=(cause,))
    equal = noise.hold(found)
    bounds = noise.bounds(found)
    said = dataclasses.replace(
        said,
        equal=equal,
        noise=bounds.noise.worst if bounds.noise is not None else None,
        comparison=found,
        notes=(*said.notes, *map(str, found.notes)),
    )
    if equal:
        return said
    diagnosis = Diagnosis(laboratory, experiment, found, noise)
    first = diagnosis.first
    return dataclasses.replace(
        said,
        first=first,
        beyond=tuple(sorted(bounds.beyond(first), key=lambda one: -one[2])) if first is not None else (),
        evaluation_apart=tuple(bounds.evaluation_apart(found)),
        causes=tuple(diagnosis.causes()),
        layer=diagnosis.first_layer(),
    )


def _planned(way: Strategy, job: Job, devices: tuple[Device, ...]) -> Strategy:
    """The strategy with what it leaves open settled, as a training would, so that all experiments have the same."""
    if not needs_one_process(way, devices):
        return way
    with alone(devices) as world:
        world.tell = lambda told: None
        return way.planned(job.replace(train_data=resolve(job.train_data, world, "train_data")), world)
