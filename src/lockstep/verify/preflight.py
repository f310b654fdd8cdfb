"""Preflight: a few updates of ``single``, to see whether the model computes in float64, and how
long it takes.
"""

from __future__ import annotations

import time
from typing import Any

from lockstep.data import job_loader, resolve
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.launch.world import place_of
from lockstep.strategies import Strategy
from lockstep.strategies.single import Single
from lockstep.verify.batches import others_in_kind, places_of
from lockstep.verify.comparison import Experiment
from lockstep.verify.training_run import Side

_LONGEST = 0.5
"""Seconds that an update of one device may take, where nobody asked for whole batches."""

_DOUBT = 1.5
"""How many times the longest an update may take, where a second one is timed: the first prepares
much.
"""

_LOOK = 2.0
"""Seconds to look at targets for."""


def preflight(
    source: Job | JobFile, job: Job, strategy: Strategy, devices: tuple[Device, ...], *, whole: bool
) -> tuple[Experiment, list[str]]:
    """Find what to verify a job with: the experiment, and notes on what of the job is replaced, and
    why.

    Ranks take the job from ``source``. With ``whole``, batches are never cut to fewer samples.

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
    shared = 2 * strategy.layout(len(devices)).local_batches * strategy.num_microbatches(job)
    fewest = min(job.batch_size, max(shared + 1, 4))
    for size in (fewest, job.batch_size):
        try:
            seconds, draws, precision = _tried(job.replace(**settings, batch_size=size), devices)
            break
        except Exception:  # so few may be too few for it
            if size == job.batch_size:
                raise
            whole = True
    settings["precision"] = precision
    if job.precision not in (None, precision):
        notes.append(f"in {precision} in the place of {job.precision}")
    if precision != "fp64":
        notes.append(
            "the model can't compute in float64, so rounding is measured: single twice, sums mixed"
        )
    most = job.batch_size if whole else _most(job.replace(**settings), devices, fewest, seconds)
    if most < job.batch_size:
        size = _uneven(job, max(fewest, most), shared)
        settings |= {
            "batch_size": size,
            "eval_batch_size": min(size, job.eval_batch_size or job.batch_size),
        }
        notes.append(
            f"batches of {size} samples instead of {job.batch_size}, to save time (--whole takes "
            "them whole)"
        )
    more = _more(job.replace(**settings), devices, notes)
    parts = strategy.num_microbatches(job.replace(**settings))
    experiment = Experiment(source, strategy, devices, parts, settings, more)
    if draws and (
        experiment.shares > 1 or not devices[0].is_slot
    ):  # else it draws what single does
        # Blocks that compute again were inspected above; another look would draw masks in them.
        inspected = job.activation_checkpointing is not None
        experiment = experiment.but(still=frozenset({"dropout"}), looked=inspected)
    return experiment, notes


def _more(job: Job, devices: tuple[Device, ...], notes: list[str]) -> tuple[int, ...]:
    """Batches to verify for their targets; what wasn't looked at is noted."""
    with alone((place_of(devices),)) as world:
        loader = job_loader(
            job.replace(accumulate=1), world, resolve(job.train_data, world, "train_data")
        )
        try:
            batches = loader.batches_of(0)
            if batches is None:
                return ()
            more, looked = others_in_kind(loader, places_of(loader, job.batch_size, 0), _LOOK)
        finally:
            loader.close()
    if looked < batches:
        notes.append(
            f"batches were looked for whose targets differ in kind, among the first {looked:,} of "
            f"{batches:,}"
        )
    return more


def _most(job: Job, devices: tuple[Device, ...], size: int, seconds: float) -> int:
    """About how many samples an update can take within the longest time, where ``size`` of them
    take ``seconds``.

    Much of what a few samples take may be of an update, not of them: so more of them are timed,
    until that is long.
    """
    each = seconds / size
    while size < job.batch_size and seconds <= _LONGEST:
        if seconds + each * (job.batch_size - size) <= _LONGEST:
            return job.batch_size
        more = min(job.batch_size, 4 * size)
        longer, _ = _seconds(job.replace(batch_size=more), devices)
        each = max(0.0, longer - seconds) / (more - size)
        if longer > _LONGEST:
            return int(size + (_LONGEST - seconds) / each)
        size, seconds = more, longer
    return size


def _tried(job: Job, devices: tuple[Device, ...]) -> tuple[float, bool, str | None]:
    """Return what ``_seconds`` gives, and the precision: fp64 where model and device can do it."""
    if devices[0].type != "mps":
        try:
            return *_seconds(job.replace(precision="fp64"), devices), "fp64"
        except (
            Exception
        ):  # a cast of its own, an operator that has no float64; else it is raised again
            pass
    own = None if job.precision is None else "fp32"
    return *_seconds(job.replace(precision=own), devices), own


def _seconds(job: Job, devices: tuple[Device, ...]) -> tuple[float, bool]:
    """Return seconds of the faster of two updates (the first prepares much), and if it draws."""
    taken: list[float] = []
    with alone((place_of(devices),)) as world:
        side = Side(job, world, Experiment(job, Single(), devices, job.accumulate))
        for batch, is_last in side.batches():
            if taken and batch.size < job.batch_size:
                continue  # one sample, perhaps, where the job's own batches leave more
            began = time.perf_counter()
            side.update(batch, is_last)
            taken.append((time.perf_counter() - began) * job.batch_size / batch.size)
            if taken[-1] > _DOUBT * _LONGEST or len(taken) == 2:
                break
        side.loader.close()
    return min(taken), bool(side.drew)


def _uneven(job: Job, size: int, fewest: int) -> int:
    """At most this batch size, such that an epoch still ends with a smaller batch, where its length
    is known.

    That has ``fewest`` samples at least, where it can: some for each share.
    """
    try:
        samples = len(job.train_data)
    except Exception:
        return size
    left = {s: samples % s for s in range(size, max(1, size - 8), -1)}
    return next((s for least in (fewest, 1) for s, some in left.items() if some >= least), size)
