"""What is logged before the first step: what is trained on what, and what has changed since a
resumed run was begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data import AnyLoader, is_stream
from lockstep.errors import counted
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
    yield Line(_batches(setup))
    yield Line(_data(setup))
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


def _batches(setup: Setup) -> str:
    """Return ``batches of 64 = 32 + 32 over the devices, in 4 micro-batches``."""
    job = setup.job
    size = _batch_size(setup)
    microbatches = setup.microbatches
    if job.batches is None:
        line = f"batches of {size:,}"
        microbatches = min(microbatches, size)  # none is empty
    else:
        line = "batches as the job lists them"

    number = setup.world.layout.local_batches
    over = "replica" if len(setup.devices) > number else "device"
    shares = setup.shares_of(size)
    if number > 1 and shares:
        line += f" = {' + '.join(_shown([str(share) for share in shares]))} over the {over}s"
    elif number > 1:
        line += f" over {counted(number, over)}"
    if job.cut_by is not None:
        line += ", by cost"
    if microbatches > 1:
        line += f", in {microbatches} micro-batches"
    return line


def _data(setup: Setup) -> str:
    """Return ``1,000 samples, 16 steps an epoch, 200 for evaluation``."""
    words = [_samples_of(setup.loader)]
    if setup.loader.samples is not None:
        words[0] += " samples"
    steps = setup.loader.batches_of(0)
    if steps:
        words.append(f"{counted(steps, 'step')} an epoch")

    sets = []
    for name, loader in setup.eval_loaders.items():
        sets.append(_samples_of(loader) + (f" ({name})" if name else ""))
    if sets:
        words.append(f"{' + '.join(sets)} for evaluation")
    return ", ".join(words)


def _samples_of(loader: AnyLoader) -> str:
    """Return the number of samples, or ``a stream``."""
    return "a stream" if loader.samples is None else f"{loader.samples:,}"


def _batch_size(setup: Setup) -> int:
    """Return the samples of the first batch: all of the data, where they are fewer than asked for."""
    size = setup.job.batch_size
    if setup.job.batches is not None:
        return size
    return min(size, setup.loader.samples or size)


def _notes(setup: Setup) -> Iterator[str | None]:
    """Yield what to know before the first step; None is nothing."""
    job = setup.job
    world = setup.world
    if setup.plan.resume:
        devices = setup.before["devices"]
        was = f"{setup.before['strategy']} on {counted(len(devices), 'device')}"
        now = f"{setup.strategy.name} on {counted(len(setup.devices), 'device')}"
        if was != now:
            yield f"was {was}, resumes as {now}"
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
        yield f"{empty} of {len(shares)} devices without a sample: increase batch_size"

    if job.metrics and not setup.eval_data:
        yield "metrics are computed on eval_data, and the job has none"
    if is_stream(setup.train_data) and job.shuffle:
        yield (
            "train_data is a stream, which isn't shuffled: its order is the same on every rank "
            "(shuffle=False omits this note)"
        )


def _shown(words: Sequence[str]) -> Sequence[str]:
    """Return words, the middle of many left out."""
    if len(words) <= 8:
        return words
    return [*words[:4], "...", words[-1]]


# ---- what has changed since a resumed run was begun ----------------------------------------------


def changes(setup: Setup) -> list[str]:
    """Return what has changed since the run was started, in lines."""
    before = setup.before
    job = setup.job
    file = setup.file
    lines: list[str] = []
    settings = dict(job.settings)
    compared: dict[str, tuple[Any, Any]] = {}

    if file is not None:
        lines += _changed_file(before, Path(file.path).resolve())
        for name, pair in changed_parameters(before, file).items():
            compared[f"--set {name}"] = pair
        for name in file.settings:
            settings.pop(name, None)
        for name, value in file.unfollowed.items():
            kept = settings.pop(name)
            lines.append(f"{name}: the run resumes with {kept}; the job file has {value} now")

    samples = setup.loader.samples
    then_samples = before.get("samples", samples)
    if samples != then_samples:
        lines.append(
            f"train_data has {samples} samples, and had {then_samples} when the run was started: "
            "the batches are different now"
        )

    for name, value in settings.items():
        if name not in _MAY_CHANGE:
            compared[name] = before["settings"].get(name, value), value
    for name, (then, value) in compared.items():
        if then != value:
            lines.append(f"{name}: it is {value}, and was {then} when the run was started")

    return lines + _kept_by_the_optimizer(before, setup)


def _changed_file(before: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield that the job file is another one, or that it was edited."""
    was = before["file"] or str(path)
    if str(path) != was:
        yield f"the job file is {path}, and was {was} when the run was started"
    elif hash_of(path) != before["sources"].get(path.name):
        yield f"{path.name} has changed since the run was started"


def _kept_by_the_optimizer(before: Mapping[str, Any], setup: Setup) -> list[str]:
    """Return the settings of the optimizer that the job has otherwise now, each once."""
    lines: dict[str, None] = {}
    for then_group, group in zip(before.get("optimizer", []), setup.optimizer, strict=False):
        for name, then in then_group.items():
            value = group.get(name, then)
            if value != then:
                lines[f"{name}: the optimizer resumes with the saved {then}, not {value}"] = None
    return list(lines)


_MAY_CHANGE = {
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
}
"""Settings that a run may well be resumed with another value of."""
