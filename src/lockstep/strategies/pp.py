"""``pp``: one process; each device holds a stage, some of the model's layers, and micro-batches
overlap over them.

Any module works unchanged, without tracing: each micro-batch's forward is ordinary Python, and takes
turns on the stages as its layers are called (`lockstep.pipelining`)::

    stage 0   F0 F1 F2 F3  .  . B0  . B1  . B2 B3
    stage 1    . F0 B0 F1 B1 F2 B2 F3 B3  .  .  .

The m micro-batches are those of ``single`` with ``accumulate=m``, and have the same numbers:
gradients are summed, and running statistics move, in the order of micro-batches, and each micro-batch
draws from its own random stream.

``mp`` is ``pp`` with one micro-batch: nothing overlaps, but a model may be as large as all devices
together, and BatchNorm and a loss over pairs see the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lockstep.data import is_stream
from lockstep.errors import LockstepError, StrategyError, TooFewLayers, error_line, nearest
from lockstep.job import Job
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.modes import draws_dropout
from lockstep.model.optimizers.build import build_optimizer
from lockstep.pipelining.device_map import stage_of
from lockstep.pipelining.planner.partition import capacities, even_split
from lockstep.pipelining.planner.plan import NUMBERS, Choice, planned
from lockstep.pipelining.planner.stage_table import Partition
from lockstep.pipelining.runner import Runner
from lockstep.pipelining.schedule import (
    SCHEDULES,
    Schedule,
    forwards_first,
    gpipe,
    interleaved,
)
from lockstep.pipelining.stage_layers import StagedModel
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat, Line
from lockstep.strategies.staged_step import StagedStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.strategy import DRAWS, Strategy

_MICROBATCHES = 4


@dataclass(frozen=True)
class PP(Strategy):
    """Stages of layers on the devices of one process, micro-batches overlapped.

    Attributes:
        device_map: prefixes of names and their stages, ``{"stem": 0, "": 1}``; None finds
            one, by measuring the layers on the job's first batch.
        microbatches: the number of micro-batches of each global batch (or of each of its parts with
            ``accumulate``); "auto" chooses it by simulation (default: by ``split_size``, else 4).
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` (several stages on each device), or
            "auto".
        split_size: the largest number of samples of a micro-batch, instead of ``microbatches``.
        chunks: the number of stages on each device (default: as in ``device_map``, else 2 for
            ``interleaved``, 1 for other schedules).
    """

    name: ClassVar[str] = "pp"
    runs_functions: ClassVar[str] = (
        "stages are found from one forward, and a step function calls modules in any order"
    )
    summary: ClassVar[str] = "one process, a stage of layers per device; micro-batches overlap"
    good_for: ClassVar[str] = "models too large for one device, or of few large layers"

    device_map: Mapping[str, int] | None = None
    # (None has no word: "none" would not be understood as four.)
    microbatches: int | Literal["auto"] = None  # type: ignore[assignment]
    schedule: str = "1f1b"
    split_size: int | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("microbatches", "chunks", "split_size"):
            value = getattr(self, name)
            if value is None or (name, value) == ("microbatches", "auto"):
                continue
            if type(value) is not int or value < 1:
                raise StrategyError(f"{self.name}: {name} is {value!r}: give a whole number from 1")
        if self.split_size is not None and self.microbatches is not None:
            raise StrategyError(
                f"{self.name}: microbatches={self.microbatches} and split_size={self.split_size} "
                "set the same number: give one of them"
            )
        known = [*SCHEDULES, "auto"]
        if self.schedule not in known:
            raise StrategyError(
                f'{self.name}: there is no schedule "{self.schedule}": '
                f"{nearest(self.schedule, known)}"
            )
        if self._has_one_stage_each and (self.chunks or 1) > 1:
            raise StrategyError(
                f"{self.name}: {self.schedule} has one stage on each device, not {self.chunks}: "
                "take interleaved or auto"
            )

    @property
    def _has_one_stage_each(self) -> bool:
        """Whether the schedule is one of those with one stage on each device."""
        return self.schedule in ("1f1b", "gpipe")

    def num_microbatches(self, job: Recipe) -> int:
        """Return how many micro-batches a global batch is cut into."""
        number = _MICROBATCHES
        if isinstance(self.microbatches, int):
            number = self.microbatches
        if self.split_size is not None and isinstance(job, Job):
            at_once = job.accumulate * self.split_size
            number = -(-job.batch_size // at_once)
        return job.accumulate * number

    def chunks_on(self, devices: int) -> int:
        """Give the number of stages of each device.

        Args:
            devices: the number of devices.
        """
        if self.chunks is not None:
            return self.chunks
        if self.device_map and not self._has_one_stage_each:
            stages = 1 + max(self.device_map.values())
            return max(1, -(-stages // devices))
        if self.schedule == "interleaved" and devices > 1:
            return 2
        return 1

    @property
    def _is_open(self) -> bool:
        """Whether a simulation chooses the micro-batches or the schedule."""
        return "auto" in (self.microbatches, self.schedule)

    # ---- stages, found by measuring --------------------------------------------------------------

    def planned(self, job: Job, world: World, before: Mapping[str, Any] | None = None) -> PP:
        """Find the layers' stages, and choose what is "auto", by measuring the job's first batch.

        A run that is resumed has the stages that it had.

        Raises:
            StrategyError: there are more stages than layers, or a device is too small for its
                stage.
        """
        self.refuse_function(job)
        way = self
        if before:
            way = self._as_before(before, len(world.devices))
        if not way._is_open:
            if way.device_map is None and len(world.devices) == 1:
                return replace(way, device_map={"": 0})
            if way.device_map is not None or is_stream(job.train_data):
                return way
        elif is_stream(job.train_data):
            raise StrategyError(
                f"{self.name}: auto needs the first batch before the training, and a stream can "
                "be read only once: give numbers (lockstep partition finds them)"
            )

        try:
            found, choice = way._measured(job, world)
        except Exception as error:
            # Layers that this forward didn't come to have parameters, too.
            is_short = isinstance(error, TooFewLayers)
            if way._is_open or (isinstance(error, LockstepError) and not is_short):
                raise
            if not is_short:
                why = f"observing a forward raised {error_line(error)}"
                world.emit(Line(f"{why}: stages are balanced by parameters", "plan"))
            return way

        _log_stages(found, world)
        way = replace(way, device_map=found.device_map)
        return way._chosen(choice, world) if way._is_open else way

    def _chosen(self, choice: Choice, world: World) -> PP:
        """Take over what a simulation chose."""
        best = choice.best
        world.emit(Line(choice.why, "plan"))
        microbatches = self.microbatches
        if microbatches == "auto":
            microbatches = best.microbatches
        return replace(
            self,
            microbatches=microbatches,
            schedule=best.schedule,
            chunks=best.plan.chunks,
        )

    def _measured(self, job: Job, world: World) -> tuple[Partition, Choice]:
        """Find the stages, and a schedule where it is open."""
        devices = world.devices
        number = self.num_microbatches(job) // job.accumulate
        chunks = self.chunks_on(len(devices))
        job = self.seen_by_a_replica(job)
        numbers: Sequence[int] = [number]
        if self.microbatches == "auto":
            numbers = NUMBERS
        schedules = None
        numbers_of_chunks = [chunks]
        if self.schedule != "auto":
            schedules = [self.schedule]
        elif self.chunks is None and self.device_map is None:
            numbers_of_chunks = [1, 2]
        return planned(
            job,
            devices,
            device_map=self.device_map,
            schedules=schedules,
            microbatches=numbers,
            chunks=numbers_of_chunks,
            capacity=_memory_of(world),
        )

    def seen_by_a_replica(self, job: Job) -> Job:
        """Give the job with batches as large as one replica computes."""
        return job

    def _as_before(self, before: Mapping[str, Any], devices: int) -> PP:
        """Settle what is open as it was in a run that is resumed."""
        names = []
        if self.microbatches == "auto":
            names += ["microbatches", "split_size"]
        if self.schedule == "auto":
            names += ["schedule", "chunks"]
        way = replace(self, **{name: before[name] for name in names if name in before})
        device_map = before.get("device_map")
        if way.device_map is None and device_map is not None:
            there = replace(way, device_map=device_map)
            stages = 1 + max(device_map.values())
            if stages == devices * there.chunks_on(devices):
                return there
        return way

    def layout(self, devices: int) -> Layout:
        """Give each device layers, all in one process."""
        return Layout({"stage": devices}, devices_per_process=devices)

    def build(self, job: Recipe, world: World) -> Step:
        """Build the model, and put each layer on the device of its stage.

        Raises:
            StrategyError: this process is one of several, the map doesn't fit, a setting can't be
                kept.
        """
        self.refuse_other_processes(world)
        self._refuse_settings(job, world)
        model = build_model(job, world, place=False)
        devices = len(world.devices)
        each = self.chunks_on(devices)
        stages = devices * each
        device_map = self.device_map
        if not device_map:
            device_map = even_split(model, stages, each)
        found = stage_of(model, device_map, stages)
        # Stages go over the devices in turn.
        places = list(range(devices)) * each
        staged = StagedModel(model, found, list(world.devices) * each)
        runner = Runner(model, world, _order_of(self, devices, job), places)
        optimizer = build_optimizer(job, model)
        cut = job.replace(accumulate=self.num_microbatches(job))
        return self.step_of(
            model,
            optimizer,
            cut,
            world,
            staged,
            runner,
        )

    def _refuse_settings(self, job: Recipe, world: World) -> None:
        kinds = sorted({device.type for device in world.devices})
        if len(kinds) > 1:
            raise StrategyError(
                f"{self.name}: its devices are of different types: {', '.join(kinds)}: use CPU "
                "devices, or accelerators of one type"
            )
        if job.sync_batchnorm and self.num_microbatches(job) > 1:
            raise StrategyError(
                f"{self.name}: sync_batchnorm would make every micro-batch wait for all the "
                "others: leave it out (BatchNorm then normalises each micro-batch, as single with "
                "accumulate does), or take one micro-batch (microbatches=1, without accumulate)"
            )
        if job.compile:
            raise StrategyError(
                f"{self.name}: compile=True compiles the whole model, but stages run its layers "
                "separately: leave it out, or call compile() of layers in the model itself"
            )
        given = self._of_jobs()
        is_own_loop = job.optimizer is not None and not isinstance(job, Job)
        if given and is_own_loop:
            raise StrategyError(
                f"{self.name}: {given} is for jobs, whose batches are known in advance: give a "
                "number and a name (lockstep partition finds them)"
            )

    def _of_jobs(self) -> str:
        """Name a setting that needs a job, whose batches are known; none is ""."""
        if self.microbatches == "auto":
            return 'microbatches="auto"'
        if self.schedule == "auto":
            return 'schedule="auto"'
        if self.split_size is not None:
            return "split_size"
        return ""

    def step_of(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        job: Recipe,
        world: World,
        staged: StagedModel,
        runner: Runner,
    ) -> Step:
        """Give the step of a model that is laid out.

        Args:
            model: the model.
            optimizer: of its parameters.
            job: its ``accumulate`` is the number of micro-batches.
            world: of this process.
            staged: the model, with its layers on several devices.
            runner: computes the micro-batches.
        """
        return StagedStep(model, optimizer, job, world, staged, runner)

    def caveats(self, job: Recipe, model: nn.Module, replicas: int) -> list[Caveat]:
        """Say what micro-batches change, and where there are fewer samples than micro-batches."""
        parts = self.num_microbatches(job)
        found = super().caveats(job.replace(accumulate=parts), model, replicas)
        if isinstance(job, Job) and job.batch_size < parts:
            size = job.batch_size
            text = f"batches of {size} samples are {size} micro-batches, not {parts}"
            found.append(Caveat("few samples", text))
        is_spread = len({p.device for p in model.parameters()}) > 1
        if is_spread and any(map(draws_dropout, model.modules())):
            found.append(DRAWS)
        return found


@dataclass(frozen=True)
class MP(PP):
    """Stages of layers on the devices of one process, one after the other."""

    name: ClassVar[str] = "mp"
    summary: ClassVar[str] = "one process, a stage of layers per device, one after the other"
    good_for: ClassVar[str] = "models too large for one device, whose batch can't be split"

    microbatches: int = 1

    @classmethod
    def choices(cls) -> set[str]:
        """Return the names of the settings, without those that say how a batch is cut."""
        return super().choices() - {"microbatches", "split_size", "schedule"}

    def __post_init__(self) -> None:
        if self.microbatches != 1 or self.split_size is not None:
            raise StrategyError("mp has one micro-batch: take pp")
        super().__post_init__()


def _order_of(way: PP, devices: int, job: Recipe) -> Callable[[int], Schedule]:
    """Give the function that makes a schedule of a number of micro-batches.

    A loss over the whole batch needs all forwards first. With ``accumulate`` not all micro-batches
    may fit in memory, so forward runs twice.
    """
    # 1F1B is interleaved with one stage on each device.
    order: Callable[[int], Schedule] = partial(interleaved, devices, chunks=way.chunks_on(devices))
    if way.schedule == "gpipe":
        order = partial(gpipe, devices)
    if job.loss_over == "batch" and job.accumulate == 1:
        return lambda microbatches: forwards_first(order(microbatches))
    return order


def _log_stages(found: Partition, world: World) -> None:
    """Log what each stage holds, and its share of the time."""
    whole = sum(stage.time for stage in found.stages) or 1.0
    stages = []
    for stage in found.stages:
        share = 100 * stage.time / whole
        stages.append(f"{stage.name} ({share:.0f} %)")
    listed = " | ".join(stages)
    world.emit(Line(f"stages: {listed} of the time, measured", "plan"))


def _memory_of(world: World) -> list[float] | None:
    """Give the bytes that a stage may take on each device; slots share what the machine has."""
    each = capacities(world.devices)
    if each is None or not world.device.is_slot:
        return each
    of_process = sum(each) / world.local_size
    return [of_process] * len(each)
