"""The answer: preflight, both sides, the bounds, and the causes where they part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.data import resolve
from lockstep.errors import DeviceError, InputError, LockstepError
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.world import place_of
from lockstep.strategies import Strategy, choose
from lockstep.strategies.single import Single
from lockstep.verify.causes import of_refusal
from lockstep.verify.comparison import COARSE, EXACT, Bounds, Comparison, Experiment, Update
from lockstep.verify.diagnosis import Diagnosis, layer_bound, layer_of
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
    ground = preflight(loaded, way, chosen, whole=whole)
    experiment = Experiment(source, way, chosen, dict(ground.settings), more=ground.more)
    least = EXACT if ground.exact else COARSE
    name = source.name if isinstance(source, JobFile) else "job"
    size = loaded.replace(**ground.settings).batch_size
    said = Verification(
        equal=False,
        job=name,
        strategy=way.name,
        devices=len(chosen),
        precision="float64" if ground.exact else "float32",
        bound=least,
        batch_size=size,
        notes=ground.notes,
    )
    parts = way.num_microbatches(loaded.replace(**ground.settings))
    try:
        # Where they part it is in the first update mostly.
        found = laboratory.compared(dataclasses.replace(experiment, watched=1, bound=layer_bound(Bounds(least))))
    except Exception as error:
        cause = of_refusal(error)
        if cause is None:
            raise
        if cause.kind in ("failed", "refused"):
            if "batch_size" in ground.settings:  # a share may be too small for it
                return _answer(source, loaded, way, chosen, laboratory, whole=True)
            # Is it the strategy's doing? Else one device says it too.
            laboratory.compared(dataclasses.replace(experiment, strategy=Single(), devices=(place_of(chosen),)))
        return dataclasses.replace(said, refused=str(error), causes=(cause,))
    noise = Noise(laboratory, experiment, parts, exact=ground.exact)
    equal = noise.hold(found)
    bounds = noise.bounds(found)
    said = dataclasses.replace(
        said,
        bound=bounds.least,
        noise=bounds.noise.worst if bounds.noise is not None else None,
        comparison=found,
        notes=(*said.notes, *map(str, found.notes)),
    )
    if equal:
        return dataclasses.replace(said, equal=True)
    shares = way.layout(len(chosen)).local_batches
    first = bounds.first_apart(found)
    diagnosis = Diagnosis(laboratory, experiment, found, noise, parts, shares)
    causes = diagnosis.causes()
    layer = diagnosis.layer
    if layer is None and first is not None and not first.rows:
        watched = found if first.number == 1 else _watched(laboratory, experiment, bounds, first)
        layer = layer_of(watched, bounds, first)
    beyond = bounds.beyond(first) if first is not None else []
    return dataclasses.replace(
        said,
        first=first,
        beyond=tuple(sorted(beyond, key=lambda one: -one[2])),
        evaluation_apart=tuple(bounds.evaluation_apart(found)),
        layer=layer,
        causes=tuple(causes),
    )


def _planned(way: Strategy, job: Job, devices: tuple[Device, ...]) -> Strategy:
    """The strategy with what it leaves open settled, as a training would, so that all experiments have the same."""
    if not needs_one_process(way, devices):
        return way
    with alone(devices) as world:
        world.tell = lambda told: None
        return way.planned(job.replace(train_data=resolve(job.train_data, world, "train_data")), world)


def _watched(laboratory: Laboratory, experiment: Experiment, bounds: Bounds, first: Update) -> Comparison:
    """One more run, as far as the first update that differs, in which every layer is looked at."""
    number, bound = first.number, layer_bound(bounds)
    again = dataclasses.replace(experiment, updates=number, watched=number, bound=bound, looked=True)
    try:
        return laboratory.compared(again)
    except LockstepError:
        return Comparison()
