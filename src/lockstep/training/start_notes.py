"""What is logged before the first step: what is trained on what, and what has changed since a
resumed run was begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data import is_stream, stream_notes
from lockstep.errors import counted
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.cores import note_on_threads
from lockstep.model.precision import note_on_precision
from lockstep.run.events import Line
from lockstep.training.progress import TrainingProgress
from lockstep.training.resume import changed_parameters
from lockstep.training.run import hash_of
from lockstep.training.setup import Setup, write_config


def open_run(setup: Setup, progress: TrainingProgress) -> None:
    """Write ``config.json``, and log what is trained; rank 0 calls this.

    Of a run that is resumed, the records up to this step are kept in ``metrics.jsonl``; how it had
    ended is removed.
    """
    write_config(setup)
    folder = setup.folder
    kept = folder.keep_metrics(progress.step, progress.record)
    if kept < progress.epoch:
        lost = f"{kept} of the {progress.epoch} records are there, the others are lost"
        setup.notes.append(Line.note(f"{folder.metrics}: {lost}"))
    for file in (folder.failure, folder.summary):
        file.unlink(missing_ok=True)

    for line in opening(setup, progress.epoch):
        setup.world.emit(line)


def opening(setup: Setup, epoch: int) -> Iterator[Line]:
    """Yield the lines before the first step::

        digits: ddp on 2 devices (cpu:0, cpu:1), gloo
        rank 0: cpu:0
        rank 1: cpu:1
        batches of 64 = 32 + 32 over the devices
        1,437 samples, 23 steps an epoch
        note: ...

    Args:
        setup: what is trained.
        epoch: completed epochs.
    """
    yield Line(_headline(setup))
    mesh = setup.strategy.mesh(setup.devices)
    yield from map(Line, _shown(mesh))
    if setup.plan.batch_size_per_device is not None:
        yield Line(_batch_size_per_device(setup, setup.plan.batch_size_per_device))
    yield Line(_batches(setup))
    if setup.plan.resume:
        yield Line(f"resuming after epoch {epoch}, step {setup.world.step}")
    yield from (Line.note(note) for note in _notes(setup) if note)
    yield from setup.notes


def _headline(setup: Setup) -> str:
    """Return ``job.py: ddp on 2 devices (cpu:0, cpu:1), gloo``."""
    devices = setup.devices
    device = setup.world.device
    where = str(device)
    if len(devices) > 1:
        where = f"{len(devices)} devices ({', '.join(_shown(devices))})"
    elif device.is_slot:
        where = f"one CPU device of {counted(device.threads, 'core')}"

    backend = setup.world.backend
    if backend:
        where += f", {backend}"
    return f"{setup.plan.name}: {setup.strategy.name} on {where}"


def _batch_size_per_device(setup: Setup, size: int) -> str:
    """Return ``batch_size_per_device: 8 x 2 replicas x 4 micro-batches = batches of 64``."""
    factors = f"{size} x {counted(setup.world.layout.local_batches, 'replica')}"
    if setup.job.accumulate > 1:
        factors += f" x {setup.job.accumulate} micro-batches"
    return f"batch_size_per_device: {factors} = batches of {setup.job.batch_size:,}"


def _batches(setup: Setup) -> str:
    """Return ``batches of 64 = 32 + 32 over the devices, in 4 micro-batches``, and in a second line
    ``1,000 samples, 16 steps an epoch, 200 for evaluation``.
    """
    job = setup.job
    size = _batch_size(setup)
    line = f"batches of {size:,}"
    microbatches = min(setup.microbatches, size)  # none is empty
    if job.batches is not None:
        line = "batches as the job lists them"
        microbatches = setup.microbatches
    line += _cut(setup)
    if microbatches > 1:
        line += f", in {microbatches} micro-batches"

    steps = setup.loader.batches_of(0)
    if steps:
        line += f"\n{setup.loader.samples:,} samples, {counted(steps, 'step')} an epoch"
    elif is_stream(setup.train_data):
        line += "\na stream"

    sets = []
    for name, loader in setup.eval_loaders.items():
        samples = "a stream"
        if loader.samples is not None:
            samples = f"{loader.samples:,}"
        if name:
            samples += f" ({name})"
        sets.append(samples)

    if sets:
        line += f", {' + '.join(sets)} for evaluation"
    return line


def _batch_size(setup: Setup) -> int:
    """Return the samples of the first batch: all of the data, where they are fewer than asked for."""
    size = setup.job.batch_size
    if setup.job.batches is not None:
        return size
    return min(size, setup.loader.samples or size)


def _cut(setup: Setup) -> str:
    """Return how a batch is divided: `` = 32 + 32 over the devices``; nothing for one device."""
    number = setup.world.layout.local_batches
    if number == 1:
        return ""
    shares = setup.shares_of(_batch_size(setup))
    if shares:
        sizes = _shown([str(share) for share in shares])
        return f" = {' + '.join(sizes)} over the {_over(setup)}s"
    by = "" if setup.job.cut_by is None else ", by cost"
    return f" over {counted(number, _over(setup))}{by}"


def _over(setup: Setup) -> str:
    """Return what a batch is divided over: devices, or replicas that have several each."""
    is_replica = len(setup.devices) > setup.world.layout.local_batches
    return "replica" if is_replica else "device"


def _notes(setup: Setup) -> Iterator[str | None]:
    """Yield what to know before the first step; None is nothing."""
    job = setup.job
    world = setup.world
    if setup.plan.resume:
        yield _moved(setup)
        moves = any(group["lr"] for group in setup.step.optimizer.param_groups)
        if setup.scheduler is not None and not moves:
            yield (
                "the learning rate is 0, as the scheduler was saved at its end: only a function of "
                "the job (LambdaLR) goes on with the new length"
            )

    yield note_on_threads(world.device)
    yield note_on_precision(job.precision, world.device.type)

    size = _batch_size(setup)
    shares = setup.shares_of(size)
    empty = shares.count(0)
    if size < job.batch_size:
        all_of_them = counted(size, "sample")
        yield f"batch_size: {job.batch_size:,} is more than the {all_of_them}: an epoch is one step"
    elif empty:
        over = counted(empty, _over(setup))
        yield f"{over} of {len(shares)} without a sample: increase batch_size"

    if job.metrics and not setup.eval_data:
        yield "metrics are computed on eval_data, and the job has none"
    if is_stream(setup.train_data):
        waits = world.size > 1 and not setup.step.together
        yield from stream_notes(job.shuffle, meets=waits)


def _shown(words: list[str]) -> list[str]:
    """Return words, the middle of many left out."""
    if len(words) <= 8:
        return words
    return [*words[:4], "...", words[-1]]


# ---- what has changed since a resumed run was begun ----------------------------------------------


def _moved(setup: Setup) -> str | None:
    """Return ``was pp on 2 CPU devices, resumes as single on 1 CPU device``.

    None where neither has changed.
    """
    strategy = setup.strategy.name
    devices = setup.devices
    was = setup.before["strategy"]
    were = setup.before["devices"]
    if (was, len(were)) == (strategy, len(devices)):
        return None
    return f"was {was} on {_counted(were)}, resumes as {strategy} on {_counted(devices)}"


def _counted(devices: Sequence[str]) -> str:
    """Return ``2 CPU devices``."""
    are_slots = all(name.startswith("cpu:") for name in devices)
    return counted(len(devices), "CPU device" if are_slots else "device")


def changes(setup: Setup, data: dict[str, Any]) -> list[str]:
    """Return what has changed since the run was started, in lines, each once.

    Args:
        setup: what is trained now.
        data: the number of samples of the training data of then.
    """
    before = setup.before
    job = setup.job
    file = setup.file
    lines: list[str | None] = []
    resumed_with: set[str] = set()
    if file is not None:
        lines.append(_changed_file(before, file.path))
        resumed_with = {*file.unfollowed, *file.settings}

    lines.append(_other_length(data, setup.train_data))
    if file is not None:
        lines += _not_followed(file, job)
        for name, (then, now) in changed_parameters(before, file).items():
            lines.append(
                f"--set {name}: it is {_given(now)}, and was {_given(then)} when the run was started"
            )

    for name, now in job.settings.items():
        then = before["settings"].get(name, now)
        if then != now and name not in _MAY_CHANGE and name not in resumed_with:
            lines.append(f"{name}: it is {now}, and was {then} when the run was started")

    for then_group, group in zip(before.get("optimizer", []), setup.optimizer, strict=False):
        for name, then in then_group.items():
            now = group.get(name, then)
            if now != then:
                lines.append(f"{name}: the optimizer resumes with the saved {then}, not {now}")

    return [line for line in dict.fromkeys(lines) if line is not None]


_MAY_CHANGE = (
    "epochs",
    "steps",
    "log_every",
    "eval_every",
    "eval_at_start",
    "eval_batches",
    "save_every",
    "keep",
    "loader_workers",
    "keep_memory",
)
"""Settings that a run may well be resumed with another value of."""


def _other_length(before: dict[str, Any], dataset: Any) -> str | None:
    """Return a line where the training data have another number of samples than before."""
    if not before or is_stream(dataset) or before["samples"] == len(dataset):
        return None
    return (
        f"train_data has {len(dataset):,} samples, and had {before['samples']:,} when the run was "
        "started: the batches are different now"
    )


def _changed_file(before: Mapping[str, Any], path: str) -> str | None:
    """Say that the job file is another one, or that it was edited; None where neither holds."""
    now = Path(path).resolve()
    was = Path(before["file"] or now)
    if now != was:
        return f"the job file is {now}, and was {was} when the run was started"
    if hash_of(now) != before["sources"].get(now.name):
        return f"{now.name} has changed since the run was started"
    return None


def _not_followed(file: JobFile, job: Job) -> Iterator[str]:
    """Yield settings that the job file has changed, and that a run keeps unless they are given."""
    for name, now in file.unfollowed.items():
        way = f"--{name.replace('_', '-')} {str(now).lower()} applies it"
        if name in ("seed", "batch_size"):
            way = "a run keeps it"
        yield (
            f"{name}: the run resumes with {job.settings[name]}; the job file has {now} now: {way}"
        )


def _given(value: Any) -> str:
    """Return a parameter of ``--set`` in words."""
    return "as the job file has it" if value is None else str(value)
