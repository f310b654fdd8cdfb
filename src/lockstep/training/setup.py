"""What a training is made of on one rank, and what the run's folder keeps of that: ``config.json``
before the first step, ``summary.json`` after the last one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.data import AnyLoader, eval_loaders, resolve, resolve_sets
from lockstep.errors import counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, written
from lockstep.launch.memory import peak_memory
from lockstep.launch.world import World
from lockstep.model.build import refuse_given_twice
from lockstep.run.events import Line
from lockstep.run.run_folder import RunFolder
from lockstep.run.terminal import duration, words_of
from lockstep.strategies import Strategy
from lockstep.strategies.steps.step import Step
from lockstep.training.progress import TrainingProgress
from lockstep.training.run import hash_of
from lockstep.training.scheduler import refuse_too_short, scheduler_of


@dataclass(frozen=True)
class Plan:
    """What each rank is given: the job, the strategy, and where the run is kept.

    Attributes:
        job: what is trained, or the file that each rank loads it from.
        strategy: what it is trained with.
        name: what the job is called.
        folder: of the run; None on a rank to which rank 0 sends it.
        resume: whether to go on from the folder's newest checkpoint.
        profile: whether to profile some steps.
        audit: whether to write down the samples of each step.
        timeout: seconds without progress after which the run ends; 0 is never.
        again: whether this is a start after a failure: a run that has ended is left as it is.
    """

    job: Job | JobFile
    strategy: Strategy
    name: str
    folder: str | None
    resume: bool = False
    profile: bool = False
    audit: bool = False
    timeout: float = 0.0
    again: bool = False


class Setup:
    """All that a training needs, built on this rank.

    Attributes:
        world: this rank's.
        plan: what every rank was given.
        job: what is trained.
        folder: of the run.
        train_data: the training data.
        eval_data: the evaluation sets by name; "" is the name of the only one.
        strategy: with all that it left open.
        step: the model and its optimizer under the strategy.
        scheduler: of the learning rate; None where the job has none.
        loader: of the training data.
        eval_loaders: of the evaluation sets, by name.
        before: the ``config.json`` of a run that is resumed; empty for a new run.
        notes: what is logged after the opening lines, before the first step.
        microbatches: of a global batch, in number.
        devices: the names of all ranks' devices.
        optimizer: the settings of the optimizer's groups, as the job gives them.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        job: Job,
        folder: RunFolder,
    ) -> None:
        self.world = world
        self.plan = plan
        self.job = job
        self.folder = folder

        self.train_data = resolve(job.train_data, world, "train_data")
        self.eval_data = {}
        if job.eval_data is not None:
            self.eval_data = resolve_sets(job.eval_data, world)

        before = {}
        if plan.resume and world.is_first:  # other hosts may not have the folder
            before = folder.read_json(folder.config)
        self.before: dict[str, Any] = world.broadcast_object(before)
        self.notes: list[Any] = []

        self.strategy, self.step = self._build()
        self.optimizer = [_numbers_in(group) for group in self.step.optimizer.param_groups]
        self.scheduler = scheduler_of(job, self.step)

        self.microbatches = self.strategy.num_microbatches(job)
        self.loader = self.strategy.training_loader(job, world, self.train_data)
        self.eval_loaders = eval_loaders(job, world, self.eval_data)

        step = self.step
        step.last_step = self.steps
        step.caveats = functools.partial(self.strategy.caveats, job, step.model, step.replicas)

        moves = self.steps if job.lr_scheduler_every == "step" else self.epochs
        refuse_too_short(self.scheduler, moves)
        self.devices: list[str] = []
        for names in world.gather_objects([str(device) for device in world.devices]):
            self.devices += names

    def _build(self) -> tuple[Strategy, Step]:
        """Plan what the strategy left open, and build its step; what they log is kept for later.

        A run that is resumed under the same strategy takes the settings that it had.
        """
        job = self.job
        plan = self.plan
        world = self.world
        # A run that is resumed has its own weights, and the initial ones may be gone.
        init = None if plan.resume else job.init
        made = job.replace(train_data=self.train_data, init=init)
        earlier = None
        if self.before.get("strategy") == plan.strategy.name:
            earlier = self.before["strategy_settings"]

        emit = world.emit
        world.emit = self.notes.append

        try:
            strategy = plan.strategy.planned(made, world, earlier)
            step = strategy.prepare(made, world)
            if not plan.resume:
                refuse_given_twice(step.model)
        finally:
            world.emit = emit

        self.notes = list(dict.fromkeys(self.notes))  # planning builds the model too
        if not job.save_frozen:
            step.saved.frozen.leave_out()
        return strategy, step

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs; None where only the steps are counted."""
        if self.job.epochs is not None:
            return self.job.epochs
        return 1 if self.job.steps is None else None

    @property
    def steps(self) -> int | None:
        """Return the step at which the training ends, where that is known."""
        batches = self.loader.batches_of(0)
        if self.epochs is None or batches is None:
            return self.job.steps
        steps = self.epochs * batches
        if self.job.steps is None:
            return steps
        return min(self.job.steps, steps)

    def shares_of(self, size: int) -> list[int]:
        """Return the samples of each local batch; none where they differ from batch to batch."""
        if self.job.batches is not None or self.job.cut_by is not None:
            return []
        return self.world.layout.sizes(size)

    @property
    def loaders(self) -> list[AnyLoader]:
        """Return the loaders of the training data and of all evaluation sets."""
        return [self.loader, *self.eval_loaders.values()]

    @property
    def file(self) -> JobFile | None:
        """Return the job's file; None where the job was made in Python."""
        job = self.plan.job
        return job if isinstance(job, JobFile) else None


def _numbers_in(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group that are numbers."""
    return {name: value for name, value in group.items() if isinstance(value, int | float)}


def write_config(setup: Setup) -> None:
    """Write what the run is made of; the strategies that it had before are kept."""
    file = setup.file
    before = setup.before
    settings = setup.job.settings
    config: dict[str, Any] = {
        "job": setup.plan.name,
        "file": None,
        "sources": {},
        "set": {},
        "given": {},
        "settings": settings,
        "strategy": setup.strategy.name,
        "strategy_settings": dataclasses.asdict(setup.strategy),
        "devices": setup.devices,
        "samples": setup.loader.samples,
        "optimizer": before.get("optimizer", setup.optimizer),
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "resumed": [],
    }
    if before:
        config["resumed"] = [*before["resumed"], before["strategy"]]

    if file is not None:
        path = Path(file.path).resolve()
        config["file"] = str(path)
        config["sources"] = {path.name: hash_of(path)}
        config["set"] = written(file.parameters)
        for name in file.settings:
            if name in settings:
                config["given"][name] = settings[name]

    setup.folder.write_json(setup.folder.config, config)


_NO_METRICS = ("train_loss", "eval_loss", "lr", "seconds", "samples_per_second")
"""The values of an epoch that ``summary.json`` has elsewhere, or not at all."""


def write_summary(
    setup: Setup,
    progress: TrainingProgress,
    shapes: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Return how the training ended, which rank 0 writes and logs; every rank calls it.

    Args:
        setup: what was trained.
        progress: at the end.
        shapes: of the first step, on each device.
        seconds: since this process began with the training.
    """
    world = setup.world
    job = setup.job
    values = progress.values
    skipped = setup.step.skips.over_ranks()
    peaks: list[int] = []
    for of_rank in world.gather_objects(peak_memory(world)):
        peaks += of_rank

    eval_samples: int | None = 0
    for loader in setup.eval_loaders.values():
        if loader.samples is None or eval_samples is None:
            eval_samples = None
        else:
            eval_samples += _evaluated(loader.samples, job)

    summary = {
        "strategy": setup.plan.strategy.name,
        "devices": setup.devices,
        "world_size": world.size,
        "epochs": progress.epoch,
        "steps": world.step,
        "skipped_updates": skipped,
        "batch_size": job.batch_size,
        "shares": setup.shares_of(job.batch_size),
        "shapes": shapes,
        "train_samples": setup.loader.samples,
        "eval_samples": eval_samples,
        "loss": values.get("eval_loss", values.get("train_loss")),
        "metrics": {name: value for name, value in values.items() if name not in _NO_METRICS},
        "samples_per_second": progress.samples / progress.seconds if progress.seconds else 0.0,
        "seconds": seconds,
        "peak_memory_bytes": peaks,
        "versions": {
            "lockstep": lockstep.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }

    if world.is_first:
        setup.folder.write_json(setup.folder.summary, summary)
        words = words_of(values)
        if skipped:
            words.append(f"{counted(skipped, 'update')} skipped")
        world.emit(Line(f"done in {duration(seconds)}: {'  '.join(words)}"))

    return summary


def _evaluated(samples: int, job: Job) -> int:
    """Return how many of the samples of an evaluation set are evaluated."""
    if job.eval_batches is None:
        return samples
    return min(samples, job.eval_batches * (job.eval_batch_size or job.batch_size))
