"""What a training is made of, on one rank: data, strategy, step, scheduler, loaders; and what is
told of it before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.data import (
    change_of,
    eval_loaders,
    is_stream,
    note_on_workers,
    resolve,
    resolve_sets,
    stream_notes,
)
from lockstep.errors import counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings, written
from lockstep.launch.devices import note_on_threads
from lockstep.launch.events import Line
from lockstep.launch.memory import peak_memory
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.terminal import duration, words_of
from lockstep.launch.world import World
from lockstep.model.build import refuse_given_twice
from lockstep.model.precision import note_on_precision
from lockstep.strategies import Strategy
from lockstep.strategies.steps.step import Step
from lockstep.tensors.rows import share_sizes
from lockstep.training.progress import held_out
from lockstep.training.resume import (
    another_file,
    changed_parameters,
    changed_settings,
    edited_files,
    moved,
    sources,
)
from lockstep.training.scheduler import note_on_length, scheduler_of


@dataclass(frozen=True)
class Plan:
    """What each rank is told: the job, the strategy, and where the run is kept."""

    job: Job | JobFile  # or the file that each rank loads it from
    strategy: Strategy
    name: str  # what the job is called
    folder: str | None  # None on a rank that hears of it from rank 0
    resume: bool = False  # go on from the folder's state
    profile: bool = False  # profile some steps
    audit: bool = False  # write down the samples of each step
    timeout: float = 0.0  # seconds without progress after which the run ends; 0 is never
    batch_size_per_device: int | None = None  # that the job's batch_size follows
    again: bool = (
        False  # started again after a failure: a run that has reached its end is left as it is
    )


def for_devices(plan: Plan, world: World) -> Plan:
    """The plan with the batch size that so many samples per device make, where that was asked
    for.
    """
    if plan.batch_size_per_device is None:
        return plan
    replicas = plan.strategy.layout(world.size * len(world.devices)).local_batches
    whole = plan.batch_size_per_device * replicas * the_job(plan.job).accumulate
    return dataclasses.replace(plan, job=with_settings(plan.job, {"batch_size": whole}))


class Setup:
    """All that a training needs, built on this rank."""

    def __init__(self, world: World, plan: Plan, job: Job, folder: RunFolder) -> None:
        self.world = world
        self.plan = plan
        self.job = job
        self.folder = folder
        self.train_data = resolve(job.train_data, world, "train_data")
        self.eval_data = {} if job.eval_data is None else resolve_sets(job.eval_data, world)
        self._said_before: list[Any] = []
        tell, world.tell = (
            world.tell,
            self._said_before.append,
        )  # it is said after what the training is
        try:
            # A run that is resumed has its own weights, and the others may be gone.
            made = job.replace(train_data=self.train_data, init=None if plan.resume else job.init)
            self.strategy = self._planned_strategy(made)
            self.step: Step = self.strategy.prepare(made, world)
            if not plan.resume:
                refuse_given_twice(self.step.model)
        finally:
            world.tell = tell
        self._said_before = list(dict.fromkeys(self._said_before))  # planning builds the model too
        if not job.save_frozen:
            self.step.leave_out_frozen()
        # As the job gives it; schedulers and saved states change it.
        self.optimizer = [
            {name: value for name, value in group.items() if isinstance(value, int | float)}
            for group in self.step.optimizer.param_groups
        ]
        self.scheduler = scheduler_of(job, self.step)
        self.parts = self.strategy.num_microbatches(job)  # micro-batches of a global batch
        self.loader = self.strategy.training_loader(job, world, self.train_data)
        self.eval_loaders = eval_loaders(job, world, self.eval_data)
        self.step.last_step = self.steps
        self.step.caveats = functools.partial(
            self.strategy.caveats, job, self.step.model, self.step.replicas
        )
        moves = self.steps if job.lr_scheduler_every == "step" else self.epochs
        self._on_schedule = note_on_length(self.scheduler, moves, job.lr_scheduler_every)
        # Those of all ranks.
        self.devices = [str(d) for mine in world.gather_objects(world.devices) for d in mine]

    def _planned_strategy(self, job: Job) -> Strategy:
        """The strategy with all that it left open; a run that is taken up under it goes on as it
        went.
        """
        reads = self.plan.resume and self.world.is_first  # other hosts may not see the folder
        self.before = before = self.world.broadcast_object(
            self.folder.read_json(self.folder.config) if reads else {}
        )
        same = before.get("strategy") == self.plan.strategy.name
        return self.plan.strategy.planned(
            job, self.world, before["strategy_settings"] if same else None
        )

    @property
    def epochs(self) -> int | None:
        """How many epochs there are; None where only the steps are counted."""
        if self.job.epochs is not None:
            return self.job.epochs
        return 1 if self.job.steps is None else None

    @property
    def steps(self) -> int | None:
        """The step at which the training ends, where that is known."""
        batches = self.loader.batches_of(0)
        ends = [
            self.job.steps,
            None if self.epochs is None or batches is None else self.epochs * batches,
        ]
        known = [end for end in ends if end is not None]
        return min(known) if known else None

    @property
    def _file(self) -> JobFile | None:
        return self.plan.job if isinstance(self.plan.job, JobFile) else None

    def note_changes(self, data: dict[str, Any]) -> None:
        """Say what is other than when the run was begun, with training data of that fingerprint."""
        settings = self.job.settings
        said = [change_of(data, self.train_data, seed=self.job.seed, name="train_data")]
        if (given := self._file) is not None:
            files = (
                another_file(self.before, given.path),
                edited_files(self.before["sources"], given.path),
            )
            said = [*files, *said]
            for name, now in given.unfollowed.items():
                way = f"--{name.replace('_', '-')} {str(now).lower()} takes that"
                way = "a run keeps it" if name in ("seed", "batch_size") else way
                said.append(
                    f"{name}: the run goes on with {settings[name]}, the job file says {now} now: "
                    f"{way}"
                )
            for name, (then, new) in changed_parameters(self.before, given).items():
                said.append(
                    f"--set {name}: it is {_set(new)}, and was {_set(then)} when the run was begun"
                )
            said += changed_settings(self.before, self.job, {*given.unfollowed, *given.settings})
        else:
            said += changed_settings(self.before, self.job)
        for then, new in zip(self.before.get("optimizer", []), self.optimizer, strict=False):
            for name in (n for n in then if n in new and then[n] != new[n]):
                said.append(
                    f"{name}: the optimizer goes on as it was saved, with {then[name]}, and not "
                    f"{new[name]}"
                )
        self._said_before += [Line.note(one) for one in dict.fromkeys(said) if one is not None]

    def write_config(self) -> None:
        """What the run is made of; the strategies under which it went before are kept."""
        given, before, settings = self._file, self.before, self.job.settings
        config = {
            "job": self.plan.name,
            "file": str(Path(given.path).resolve()) if given else None,
            "sources": sources(given.path) if given else {},
            "set": written(given.parameters) if given else {},
            "given": {n: settings[n] for n in given.settings if n in settings} if given else {},
            "settings": settings,
            "strategy": self.strategy.name,
            "strategy_settings": dataclasses.asdict(self.strategy),
            "devices": self.devices,
            "mesh": self.strategy.mesh(self.devices),
            "optimizer": before.get("optimizer", self.optimizer),
            "world_size": self.world.size,
            "backend": self.world.backend,
            "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
            "resumed": [*before["resumed"], before["strategy"]] if before else [],
        }
        self.folder.write_json(self.folder.config, config)

    def keep_records(self, epoch: int, last: dict[str, Any] | None) -> None:
        """Leave the records up to this step, with ``last``; so many epochs are done."""
        kept = self.folder.keep_metrics(self.world.step, last)
        if kept < epoch:
            lost = (
                f"{self.folder.metrics}: {kept} of the {epoch} records are there, the others "
                "are lost"
            )
            self._said_before.append(Line.note(lost))
        for ended in (self.folder.failure, self.folder.summary):
            ended.unlink(missing_ok=True)

    def opening(self, epoch: int) -> Iterator[Any]:
        """What is told before the first step, ``epoch`` epochs being done."""
        world, job, devices = self.world, self.job, self.devices
        on = (
            f"{len(devices)} devices ({_abridged(devices)})"
            if len(devices) > 1
            else str(world.device)
        )
        if len(devices) == 1 and world.device.is_slot:
            on = f"one CPU device of {counted(world.device.threads, 'core')}"
        via = f", {world.backend}" if world.backend else ""
        yield Line(f"{self.plan.name}: {self.strategy.name} on {on}{via}")
        mesh = self.strategy.mesh(devices)
        yield from map(Line, mesh if len(mesh) <= 8 else [*mesh[:4], "...", mesh[-1]])
        shares = share_sizes(job.batch_size, world.layout.local_batches)
        cut = min(self.parts, job.batch_size)  # no micro-batch is empty
        parts = f", in {cut} micro-batches" if cut > 1 else ""
        over = "replicas" if len(devices) > len(shares) else "devices"
        split = (
            f" = {_abridged([str(s) for s in shares], ' + ')} over the {over}"
            if len(shares) > 1
            else ""
        )
        of = self.loader.batches_of(0)
        length = (
            f"{self.loader.samples:,} samples, {counted(of, 'step')} an epoch" if of else "a stream"
        )
        if (each := self.plan.batch_size_per_device) is not None:
            times = f"{each} x {counted(world.layout.local_batches, 'replica')}"
            times += f" x {job.accumulate} micro-batches" if job.accumulate > 1 else ""
            yield Line(f"batch_size_per_device: {times} = batches of {job.batch_size:,}")
        yield Line(
            f"batches of {job.batch_size:,}{split}{parts}; {length}{held_out(self.eval_loaders)}"
        )
        if self.plan.resume:
            yield Line(f"resuming after epoch {epoch}, step {world.step}")
            if told_of := moved(self.before, self.strategy.name, devices):
                yield Line.note(told_of)
            if self.scheduler is not None and not any(
                group["lr"] for group in self.step.optimizer.param_groups
            ):
                yield Line.note(
                    "the learning rate is 0: the scheduler resumes as it was saved, at its end"
                )
        idle = len(shares) - sum(map(bool, shares))
        notes = [
            note_on_threads(world.device),
            note_on_precision(job.precision, world.device.type),
            _note_on_cores(len(devices)) if world.device.is_slot else None,
            f"{counted(idle, over[:-1])} of {len(shares)} get no sample: increase batch_size"
            if idle
            else None,
            f"{self.parts} micro-batches of {job.batch_size} samples: {cut} are made"
            if cut < self.parts
            else None,
            note_on_workers(job.loader_workers, world.local_size),
            self._on_schedule,
            "metrics are computed on eval_data, and the job has none"
            if job.metrics and not self.eval_data
            else None,
        ]
        if is_stream(self.train_data):
            notes += stream_notes(job.shuffle, meets=world.size > 1 and not self.step.together)
        yield from (Line.note(note) for note in notes if note)
        yield from self._said_before

    def summary(
        self,
        seconds: float,
        epoch: int,
        record: Mapping[str, float],
        shapes: dict[str, Any],
        trained: int,
        training: float,
    ) -> dict[str, Any]:
        """How the training ended, which rank 0 writes and tells; every rank calls it.

        Args:
            seconds: since this process began.
            epoch: epochs that are done.
            record: of the last one.
            shapes: of the first step.
            trained: samples of this process.
            training: seconds that they took.
        """
        peaks = [
            peak for peaks in self.world.gather_objects(peak_memory(self.world)) for peak in peaks
        ]
        named = ("train_loss", "eval_loss", "lr", "seconds", "samples_per_second")
        held = [
            loader.samples for loader in self.eval_loaders.values() if loader.samples is not None
        ]
        skipped = self.step.skips.over_ranks()
        summary = {
            "strategy": self.plan.strategy.name,
            "devices": self.devices,
            "world_size": self.world.size,
            "epochs": epoch,
            "steps": self.world.step,
            "skipped_updates": skipped,
            "batch_size": self.job.batch_size,
            "shares": share_sizes(self.job.batch_size, self.world.layout.local_batches),
            "shapes": shapes,
            "train_samples": self.loader.samples,
            "eval_samples": sum(held) if len(held) == len(self.eval_loaders) else None,
            "loss": record.get("eval_loss", record.get("train_loss")),
            "metrics": {name: value for name, value in record.items() if name not in named},
            "samples_per_second": trained / training if training else 0.0,
            "seconds": seconds,
            "peak_memory_bytes": peaks,
            "versions": {
                "lockstep": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        if self.world.is_first:
            self.folder.write_json(self.folder.summary, summary)
            words = words_of(record)
            if skipped:
                words.append(f"{counted(skipped, 'update')} skipped")
            self.world.tell(Line(f"done in {duration(seconds)}: {'  '.join(words)}"))
        return summary


def _set(value: Any) -> str:
    return "as the job file has it" if value is None else str(value)


def _note_on_cores(devices: int) -> str | None:
    cores = os.cpu_count() or 1
    return (
        f"{devices} CPU devices take turns on {counted(cores, 'core')}"
        if devices > 4 * cores
        else None
    )


def _abridged(words: list[str], between: str = ", ") -> str:
    return between.join(words if len(words) <= 8 else [*words[:4], "...", words[-1]])
