"""Preflight: a few updates of ``single`` show whether the model computes in float64, and how long
it takes.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.launch.world import place_of
from lockstep.strategies import Strategy
from lockstep.strategies.single import Single
from lockstep.verify.comparison import Experiment
from lockstep.verify.training_run import Side

_LONGEST = 0.5
"""Seconds that an update of one device may take, about, where nobody asked for whole batches."""

_FEWEST = 4
"""Samples of the smallest batch that is tried."""


def preflight(
    source: Job | JobFile, job: Job, strategy: Strategy, devices: tuple[Device, ...], *, whole: bool
) -> tuple[Experiment, list[str]]:
    """Find what to verify a job with: the experiment, and notes on what of the job is replaced.

    Args:
        source: the job, as ranks load it.
        job: the same, loaded.
        strategy: that is compared with one device.
        devices: those of the strategy.
        whole: never cut batches to fewer samples.

    Raises:
        LockstepError: ``single`` can't train the job.
        Exception: what the job's own code raises under ``single``.
    """
    settings: dict[str, Any] = {"loader_workers": 0}
    notes = []
    if job.compile:
        settings["compile"] = False
        notes.append("without compile, which only changes rounding")
    if job.callbacks:
        notes.append("without callbacks: two trainings show whether they are the same under both")

    whole = whole or job.batches is not None

    # Two samples for each local micro-batch.
    shared = 2 * strategy.layout(len(devices)).local_batches * strategy.num_microbatches(job)
    size = min(job.batch_size, max(shared + 1, _FEWEST))

    try:
        small = job.replace(**settings, batch_size=size)
        seconds, draws, precision = _tried(small, devices)
    except Exception:  # so few may be too few for it
        whole = True
        seconds, draws, precision = _tried(job.replace(**settings), devices)

    settings["precision"] = precision
    if job.precision not in (None, precision):
        notes.append(f"in {precision} instead of {job.precision}")
    if precision != "fp64":
        notes.append(
            "the model can't compute in float64, so rounding is measured by two runs of single"
        )

    # Some of the time is that of any update, so more samples may take as long.
    while not whole and size < job.batch_size and seconds <= _LONGEST:
        size = min(job.batch_size, 4 * size)
        seconds, _ = _seconds(job.replace(**settings, batch_size=size), devices)
    if not whole and size < job.batch_size:
        size = _uneven(job, size, shared)
        settings["batch_size"] = size
        settings["eval_batch_size"] = min(size, job.eval_batch_size or job.batch_size)
        notes.append(
            f"batches of {size} samples instead of {job.batch_size}, to save time (--whole keeps "
            "them whole)"
        )

    parts = strategy.num_microbatches(job.replace(**settings))
    experiment = Experiment(source, strategy, devices, parts, settings)
    masks_differ = experiment.shares > 1 or not devices[0].is_slot
    if draws and masks_differ:
        experiment = experiment.but(still=frozenset({"dropout"}))
    return experiment, notes


def _tried(job: Job, devices: tuple[Device, ...]) -> tuple[float, bool, str | None]:
    """Return what ``_seconds`` gives, and the precision: fp64 where model and device can do it."""
    if devices[0].type != "mps":
        try:
            seconds, draws = _seconds(job.replace(precision="fp64"), devices)
        except Exception:  # a cast of its own, say; any other error is raised below
            pass
        else:
            return seconds, draws, "fp64"

    precision = None if job.precision is None else "fp32"
    seconds, draws = _seconds(job.replace(precision=precision), devices)
    return seconds, draws, precision


def _seconds(job: Job, devices: tuple[Device, ...]) -> tuple[float, bool]:
    """Return the seconds of the faster of two updates, and whether the model draws."""
    taken: list[float] = []

    with alone((place_of(devices),)) as world:
        experiment = Experiment(job, Single(), devices, job.accumulate)
        side = Side(job, world, experiment)
        # The first update prepares much.
        for batch, is_last in itertools.islice(side.batches(), 2):
            began = time.perf_counter()
            side.update(batch, is_last)
            seconds = time.perf_counter() - began
            taken.append(seconds * job.batch_size / batch.size)
        side.loader.close()

    return min(taken), side.drew


def _uneven(job: Job, size: int, fewest: int) -> int:
    """Return at most this batch size, such that an epoch still ends with a smaller batch.

    That has ``fewest`` samples, where it can, some for each share. Where the length of the data
    isn't known, the size stays.
    """
    try:
        samples = len(job.train_data)
    except Exception:
        return size

    sizes = range(size, max(1, size - 8), -1)
    return max(sizes, key=lambda smaller: min(samples % smaller, fewest), default=size)
