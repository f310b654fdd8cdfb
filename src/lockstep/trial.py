"""A trial: a few timed updates of a job under one strategy with some settings, in fresh processes.

::

    first update | 2 updates | 4 | 8 | ...     until a chunk takes long enough: that one's rate counts
     (compiles)    (warm up)
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lockstep import devices as _devices
from lockstep.allocator import keep_freed_memory
from lockstep.data import Batch, default_workers, is_stream, job_loader, resolve
from lockstep.data.fetch import unwrapped
from lockstep.data.workers import free_cores
from lockstep.devices import Device
from lockstep.events import Line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.local import run as run_locally
from lockstep.memory import peak_memory
from lockstep.placement import alone, place_of
from lockstep.step import Step
from lockstep.strategies import Strategy, choose
from lockstep.world import World


@dataclass(frozen=True)
class Way:
    """A way to train a job on this machine.

    Attributes:
        strategy: by name.
        devices: as a person writes them.
        settings: fields of the job that are replaced.
    """

    strategy: str
    devices: str
    settings: dict[str, Any] = field(default_factory=dict)

    def having(self, **settings: Any) -> Way:
        """The same with some settings changed."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def words(self) -> str:
        """``--strategy dp --devices 2xcpu --channels-last``: what to say to the command."""
        said = [f"--strategy {self.strategy} --devices {self.devices}"]
        for name, value in self.settings.items():
            option = f"--{name.replace('_', '-')}"
            said.append(option if value is True else f"{option} {str(value).lower()}")
        return " ".join(said)

    @property
    def arguments(self) -> str:
        """``strategy="dp", devices="2xcpu", channels_last=True``: what to say to ``train`` in Python."""
        said = {"strategy": self.strategy, "devices": self.devices, **self.settings}
        return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in said.items())


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
        exceptions: where the numbers are not those of one device.
    """

    rate: float
    first: float
    peak: int
    fused: bool
    convolves: bool
    dtype: torch.dtype
    workers: int | None
    exceptions: tuple[str, ...]


def attempt(job: Job | JobFile, way: Way, *, seconds: float, patience: float | None = None) -> Tried:
    """Try a way to train, in processes that end with the trial.

    Args:
        job: what to train.
        way: the strategy, the devices and the settings.
        seconds: how long the timed updates take at least.
        patience: where the first update alone takes longer than that, its rate is the trial's.

    Raises:
        LockstepError: this way is refused, or fails.
    """
    chosen = _devices.parse(way.devices)
    strategy = choose(way.strategy, chosen)
    plan = _Plan(with_settings(job, way.settings), strategy, chosen, seconds, patience)
    places = (place_of(chosen),) if strategy.processes == "one" else chosen
    return run_locally(
        _on_rank,
        places,
        (plan,),
        backend=None,
        folder=None,
        on_event=None,
        on_output=lambda text, stream: None,
        timeout=1800.0,
    )[0]


@dataclass(frozen=True)
class _Plan:
    job: Job | JobFile
    strategy: Strategy
    devices: tuple[Device, ...]
    seconds: float
    patience: float | None


def _on_rank(world: World, plan: _Plan) -> Tried:
    job = the_job(plan.job)
    if job.keep_memory:
        keep_freed_memory()  # the process ends with the trial
    if plan.strategy.processes == "one":
        with alone(plan.devices) as mine:
            return _tried(mine, job, plan)
    return _tried(world, job, plan)


def _tried(world: World, job: Job, plan: _Plan) -> Tried:
    notes: list[str] = []
    world.tell = lambda told: notes.append(told.text) if isinstance(told, Line) and told.kind == "note" else None
    data = resolve(job.train_data, world, "train_data")
    strategy = plan.strategy.planned(job.having(train_data=data), world)
    step = strategy.build(job, world)
    loader = job_loader(job.having(accumulate=strategy.parts(job)), world, data)
    batches = _endless(loader)
    first, size = _timed(step, batches, 1, job.seed)
    rate = size / first
    count = 1
    if plan.patience is None or first < plan.patience:
        elapsed = 0.0
        while elapsed < plan.seconds:
            count *= 2
            elapsed, size = _timed(step, batches, count, job.seed)
        rate = size / elapsed
    step.check()
    batches.close()
    loader.close()
    parameters = list(step.model.parameters())
    return Tried(
        rate=rate,
        first=first,
        peak=sum(byte for mine in world.gather_objects(peak_memory(world)) for byte in mine),
        fused=any(group.get("fused") for group in step.optimizer.param_groups),
        convolves=any(p.dim() == 4 for p in parameters),
        dtype=parameters[0].dtype if parameters else torch.float32,
        workers=_workers(job, world, data),
        exceptions=(*strategy.exceptions(job, step.model, step.replicas), *notes),
    )


def _workers(job: Job, world: World, data: Any) -> int | None:
    if not is_stream(data) and type(unwrapped(data)[0]) is TensorDataset:
        return None
    if job.loader_workers is not None:
        return job.loader_workers
    return default_workers(len(free_cores()), world.local_size, data)


def _endless(loader: Any) -> Generator[Batch]:
    epoch = 0
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
