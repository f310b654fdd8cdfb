"""A trial: a few timed updates of a job under one strategy with some settings, in fresh processes.

::

    first update | 2 updates | 4 | 8 | ...     until a chunk takes long enough: that one's rate counts
     (compiles)    (warm up)               | a few more, looked at, where that is wanted (see ``snapshot``)
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import TensorDataset

from lockstep.compare.snapshot import Glance, Onlooker
from lockstep.data import Batch, default_workers, is_stream, resolve
from lockstep.data.fetch import base_of
from lockstep.data.loader_workers import free_cores
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.events import Caveat, Line
from lockstep.launch.memory import peak_memory
from lockstep.launch.placement import alone, place_of
from lockstep.launch.processes.local_ranks import run as run_locally
from lockstep.launch.world import World, now
from lockstep.model.checkpoint import save_weights
from lockstep.strategies import STRATEGIES, Strategy, choose
from lockstep.strategies.step import Step
from lockstep.tensors.allocator import keep_freed_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """A way to train a job on this machine.

    Attributes:
        strategy: by name.
        devices: as a person writes them, or the devices themselves (one slot of several has no word).
        settings: fields of the job that are replaced.
        options: settings of the strategy's own.
    """

    strategy: str
    devices: str | tuple[Device, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def replace(self, **settings: Any) -> Way:
        """The same with some settings changed."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def words(self) -> str:
        """``--strategy dp --devices 2xcpu --channels-last``: what to say to the command."""
        said = [f"--strategy {self.strategy} --devices {self.device_words}"]
        for name, value in {**self.options, **self.settings}.items():
            option = f"--{name.replace('_', '-')}"
            if name == "device_map":
                said.append(f"--map {shlex.quote(json.dumps(dict(value)))}")
            else:
                said.append(option if value is True else f"{option} {str(value).lower()}")
        return " ".join(said)

    @property
    def device_words(self) -> str:
        """The devices as a person writes them, as far as there is a word."""
        return self.devices if isinstance(self.devices, str) else ",".join(map(str, self.devices))

    @property
    def arguments(self) -> str:
        """``strategy="dp", devices="2xcpu", channels_last=True``: what to say to ``train`` in Python."""
        strategy = f'"{self.strategy}"'
        if self.options:
            kind = STRATEGIES[self.strategy].__name__
            strategy = f"{kind}({_arguments(self.options)})"
        return f"strategy={strategy}, {_arguments({'devices': self.devices, **self.settings})}"

    def line(self, job: Job | JobFile) -> str:
        """What to paste, to train a job so."""
        if not isinstance(job, JobFile):
            return f"lockstep.train(job, {self.arguments})"
        knobs = "".join(f" --set {name}={value}" for name, value in job.knobs.items())
        return f"lockstep train {job.path}{knobs} {replace(self, settings={**job.settings, **self.settings}).words}"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in values.items())


@dataclass(frozen=True)
class Tried:
    """What a trial found.

    Attributes:
        rate: samples per second.
        first: seconds of the first update, in which compilers compile.
        peak: bytes that the processes held at most, or that the accelerators did; the sum over them.
        fused: whether the optimizer's implementation is a fused one.
        convolves: whether the model has convolutions, whose weights have a layout.
        dtype: the format of the parameters.
        workers: loader workers of each rank; None where they would only slow it down (a dataset of tensors).
        caveats: where results differ from single-device training.
        peaks: the bytes of each process, or of each accelerator.
        started: seconds from asking for the trial until the first update was done.
        glance: what was seen of some updates, where that was asked for.
        system: the part of this process's processor time that the system took, while updates were timed.
        plans: what was chosen for it: the stages of a pipeline, say.
    """

    rate: float
    first: float
    peak: int
    fused: bool
    convolves: bool
    dtype: torch.dtype
    workers: int | None
    caveats: tuple[Caveat, ...]
    peaks: tuple[int, ...] = ()
    started: float = 0.0
    glance: Glance | None = None
    system: float = 0.0
    plans: tuple[str, ...] = ()


def attempt(
    job: Job | JobFile, way: Way, *, seconds: float, patience: float | None = None, looks: bool = False
) -> Tried:
    """Try a way to train, in processes that end with the trial.

    Args:
        job: what to train.
        way: the strategy, the devices and the settings.
        seconds: how long the timed updates take at least.
        patience: where the first update alone takes longer than that, its rate is the trial's.
        looks: after the timed updates, look at some more: what each device sees, and where its time goes.

    Raises:
        LockstepError: this way is refused, or fails.
    """
    return _in_fresh_processes(_tried, job, way, seconds=seconds, patience=patience, looks=looks)


def weights_after(job: Job | JobFile, way: Way, file: Path, *, updates: int, before: Path | None = None) -> float:
    """Make some updates in processes that end with them, and keep the weights, under one-device names.

    The updates are the last of the first epoch, on a smaller batch as a rule, and the first ones of the second.

    Args:
        job: what to train.
        way: the strategy, the devices and the settings.
        file: for the weights afterwards.
        updates: how many.
        before: a file for those at the start.

    Returns:
        How far SGD's parameters may have gone for a gradient of 1: the sum of the learning rates.

    Raises:
        LockstepError: this way is refused, or fails.
    """
    return _in_fresh_processes(_kept, job, way, updates=updates, file=file, before=before)


def _in_fresh_processes(function: Callable[[World, Job, _Plan], T], job: Job | JobFile, way: Way, **settings: Any) -> T:
    """Call it on every rank that the way wants; gives rank 0's result."""
    chosen = _devices.parse(way.devices)
    strategy = choose(way.strategy, chosen, **way.options)
    plan = _Plan(with_settings(job, way.settings), strategy, chosen, asked=now(), **settings)
    places = (place_of(chosen),) if strategy.processes == "one" else chosen
    found: T = run_locally(
        _on_rank,
        places,
        (function, plan),
        backend=None,
        folder=None,
        on_event=None,
        on_output=lambda text, stream: None,
        timeout=1800.0,
    )[0]
    return found


@dataclass(frozen=True)
class _Plan:
    job: Job | JobFile
    strategy: Strategy
    devices: tuple[Device, ...]
    asked: float
    seconds: float = 0.0
    patience: float | None = None
    looks: bool = False
    updates: int = 0
    file: Path | None = None
    before: Path | None = None


def _on_rank(world: World, function: Callable[[World, Job, _Plan], T], plan: _Plan) -> T:
    job = the_job(plan.job)
    if job.keep_memory:
        keep_freed_memory()  # the process ends with the trial
    if plan.strategy.processes == "one":
        with alone(plan.devices) as mine:
            return function(mine, job, plan)
    return function(world, job, plan)


def _tried(world: World, job: Job, plan: _Plan) -> Tried:
    lines: list[Line] = []
    world.tell = lambda told: lines.append(told) if isinstance(told, Line) else None
    data = resolve(job.train_data, world, "train_data")
    strategy = plan.strategy.planned(job.replace(train_data=data), world)
    step = strategy.build(job, world)
    loader = strategy.training_loader(job, world, data)
    batches = _endless(loader)
    onlooker = Onlooker(step) if plan.looks else None
    first, size = _timed(step, batches if onlooker is None else onlooker.first(batches), 1, job.seed)
    rate, started = size / first, now() - plan.asked
    before = os.times()
    count = 1
    if plan.patience is None or first < plan.patience:
        elapsed = 0.0
        while elapsed < plan.seconds:
            count *= 2
            elapsed, size = _timed(step, batches, count, job.seed)
        rate = size / elapsed
    after = os.times()
    step.check()
    glance = None if onlooker is None else onlooker.seen(batches, job.seed)
    batches.close()
    loader.close()
    peaks = tuple(byte for mine in world.gather_objects(peak_memory(world)) for byte in mine)
    parameters = list(step.model.parameters())
    return Tried(
        rate=rate,
        first=first,
        peak=sum(peaks),
        fused=any(group.get("fused") for group in step.optimizer.param_groups),
        convolves=any(p.dim() == 4 for p in parameters),
        dtype=parameters[0].dtype if parameters else torch.float32,
        workers=_workers(job, world, data),
        caveats=(
            *strategy.caveats(job, step.model, step.replicas),
            *(line.as_caveat for line in lines if line.kind == "note"),
        ),
        peaks=peaks,
        started=started,
        glance=glance,
        system=_system(before, after),
        plans=tuple(line.text for line in lines if line.kind == "plan"),
    )


def _system(before: os.times_result, after: os.times_result) -> float:
    system, user = after.system - before.system, after.user - before.user
    return system / (system + user) if system + user else 0.0


def _kept(world: World, job: Job, plan: _Plan) -> float:
    data = resolve(job.train_data, world, "train_data")
    step = plan.strategy.build(job, world)
    loader = plan.strategy.training_loader(job, world, data)
    start = step.state_dict()["model"]  # on every rank: buffers are shared for it
    if plan.before is not None and world.is_first:
        save_weights(plan.before, start)
    batches = _endless(loader, -1)
    reach = 0.0
    for _ in range(plan.updates):
        batch = next(batches)
        step.seed(job.seed)
        step.update(batch)
        reach += float(step.optimizer.param_groups[0].get("lr", 0.0))
    step.check()
    batches.close()
    loader.close()
    weights = step.state_dict()["model"]
    if world.is_first:
        assert plan.file is not None
        save_weights(plan.file, weights)
    return reach


def first_of(chosen: Sequence[Device], count: int) -> str:
    """How a person writes the first so many of these devices."""
    if chosen[0].is_slot:
        return f"{count}xcpu"
    return f"{chosen[0].type}:{','.join(str(d.index) for d in chosen[:count])}"


def _workers(job: Job, world: World, data: Any) -> int | None:
    if not is_stream(data) and type(base_of(data)) is TensorDataset:
        return None
    if job.loader_workers is not None:
        return job.loader_workers
    return default_workers(len(free_cores()), world.local_size, data)


def _endless(loader: Any, start: int = 0) -> Generator[Batch]:
    """Epoch after epoch, the first from batch ``start`` on; -1 is its last one, where a stream's is not known."""
    of = loader.batches_of(0)
    yield from loader.epoch(0, start if start >= 0 else max(0, (of or 1) - 1))
    epoch = 1
    while True:
        yield from loader.epoch(epoch, 0)
        epoch += 1


def _timed(step: Step, batches: Iterator[Batch], count: int, seed: int) -> tuple[float, int]:
    """Seconds of rank 0 for so many updates, and their samples; the same on every rank."""
    world = step.world
    start = time.perf_counter()
    size = 0
    for _ in range(count):
        batch = next(batches)
        step.seed(seed)
        step.update(batch)
        size += batch.size
    for device in world.devices:
        if not device.is_slot:
            torch.accelerator.synchronize(device.index)
    return world.broadcast_object(time.perf_counter() - start), size
