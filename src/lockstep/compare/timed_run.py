"""Trials: a few timed updates of a job under one strategy with some settings, each in processes that
end with it, so that no memory, cache or thread of one is there for the next.

::

    first update | 2 updates | 4 | 8 | ...     until a chunk takes long enough: that one's rate counts
     (compiles)    (warm up)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import monotonic as now
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lockstep.compare.planned_rows import Setup
from lockstep.compare.timing import Timing, rate_of
from lockstep.data import Batch, is_stream, resolve
from lockstep.data.fetch import base_of
from lockstep.data.loader_workers import workers_here
from lockstep.errors import LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.memory import peak_memory
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.processes.local_ranks import run as run_locally
from lockstep.launch.world import World, place_of
from lockstep.run.events import Caveat, Line
from lockstep.strategies import Strategy, choose
from lockstep.strategies.steps.step import Step
from lockstep.tensors.allocator import keep_freed_memory
from lockstep.training.records.batch_shapes import FirstStep


@dataclass(frozen=True)
class TrialResult:
    """What a trial found.

    Attributes:
        rate: samples per second.
        first: seconds of the first update, in which compilers compile.
        peaks: the most bytes that each process, or each accelerator, held.
        convolves: whether the model has convolutions, whose weights have a layout.
        workers: of each rank's loader; None for a dataset of tensors, which they would slow down.
        caveats: where results differ from single-device training.
        plans: what was chosen for it, such as the stages of a pipeline.
        started: seconds from the call until the first update was done.
        shapes: of the first update on each device, where that was asked for.
    """

    rate: float
    first: float
    peaks: tuple[int, ...]
    convolves: bool = False
    workers: int | None = None
    caveats: tuple[Caveat, ...] = ()
    plans: tuple[str, ...] = ()
    started: float = 0.0
    shapes: Sequence[dict[str, Any]] = ()

    @property
    def peak(self) -> int:
        """The bytes of all processes, or accelerators."""
        return sum(self.peaks)


def attempt(
    job: Job | JobFile,
    setup: Setup,
    *,
    seconds: float,
    looks: bool = False,
) -> TrialResult:
    """Try a setup, in processes that end with the trial.

    Args:
        job: the job, or its file.
        setup: how it is trained.
        seconds: how long the timed updates take at least.
        looks: note the shapes on each device.

    Raises:
        LockstepError: this setup is refused, or fails.
    """
    chosen = _devices.parse(setup.devices)
    strategy = choose(setup.strategy, chosen, **setup.options)
    is_one = needs_one_process(strategy, chosen)
    found: list[TrialResult] = run_locally(
        _on_rank,
        (place_of(chosen),) if is_one else chosen,
        (with_settings(job, setup.settings), strategy, chosen, now(), seconds, looks),
        on_output=lambda text, stream: None,
        timeout=1800.0,
        devices_per_rank=1 if is_one else strategy.devices_per_rank,
    )
    return found[0]


@dataclass
class Turns:
    """The trials of one setup, one in each round.

    Attributes:
        tries: one for each turn.
        reason: why one of them failed; there are no more then.
    """

    tries: list[TrialResult] = field(default_factory=list)
    reason: str = ""

    @property
    def timing(self) -> Timing:
        """The rates, turn by turn."""
        return Timing([tried.rate for tried in self.tries])


def in_turns(
    job: Job | JobFile,
    setups: Mapping[str, Setup],
    rounds: int,
    seconds: float,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Turns]:
    """Try each setup once in each round, one after the other.

    Args:
        job: the job, or its file.
        setups: by name.
        rounds: how many turns each has.
        seconds: how long the timed updates of a turn take at least.
        log: called after each round.
    """
    found = {name: Turns() for name in setups}
    for number in range(rounds):
        for name, setup in setups.items():
            turns = found[name]
            if not turns.reason:
                try:
                    turns.tries.append(attempt(job, setup, seconds=seconds))
                except LockstepError as error:
                    turns.reason = first_line(error)
        log(f"round {number + 1}/{rounds} done")
    return found


def _on_rank(
    world: World,
    source: Job | JobFile,
    strategy: Strategy,
    devices: tuple[Device, ...],
    *how: Any,
) -> TrialResult:
    job = the_job(source)
    if job.keep_memory:
        keep_freed_memory()  # the process ends with the trial
    with alone(devices) if needs_one_process(strategy, devices) else nullcontext(world) as mine:
        return _tried(mine, job, strategy, *how)


def _tried(
    world: World,
    job: Job,
    strategy: Strategy,
    asked: float,
    seconds: float,
    looks: bool,
) -> TrialResult:
    """Make a trial on this rank.

    Args:
        world: of this rank.
        job: the job.
        strategy: its settings, as a person chose them.
        asked: when the trial was asked for.
        seconds: how long the timed updates take at least.
        looks: whether the shapes on each device are noted.
    """
    lines: list[Line] = []

    def keep(event: object) -> None:
        if isinstance(event, Line):
            lines.append(event)

    world.emit = keep
    data = resolve(job.train_data, world, "train_data")
    strategy = strategy.planned(job.replace(train_data=data), world)
    step = strategy.prepare(job, world)
    step.sums.last = 1  # later checks are few in a training, and many in the updates of a turn
    loader = strategy.training_loader(job, world, data)
    batches = _endless(loader)
    observer = FirstStep(step) if looks else None
    first, _ = _timed(step, batches, 1, job.seed)
    started = now() - asked
    shapes = []
    if observer is not None:
        mine = [str(device) for device in world.devices]
        names = itertools.chain(*world.gather_objects(mine))
        shapes = observer.done(list(names))
    rate = rate_of(lambda count: _timed(step, batches, count, job.seed), seconds)
    step.check()
    batches.close()
    loader.close()

    peaks: list[int] = []
    for of_rank in world.gather_objects(peak_memory(world)):
        peaks += of_rank
    caveats = list(strategy.caveats(job, step.model, step.replicas))
    caveats += [line.as_caveat for line in lines if line.kind == "note"]
    return TrialResult(
        rate=rate,
        first=first,
        peaks=tuple(peaks),
        convolves=any(p.dim() == 4 for p in step.model.parameters()),
        workers=_workers(job, world, data),
        caveats=tuple(caveats),
        plans=tuple(line.text for line in lines if line.kind == "plan"),
        started=started,
        shapes=shapes,
    )


def _workers(job: Job, world: World, data: Any) -> int | None:
    """Return the number of loader workers of a rank; None for a dataset of tensors."""
    if not is_stream(data) and type(base_of(data)) is TensorDataset:
        return None
    if job.loader_workers is not None:
        return job.loader_workers
    return workers_here(
        data,
        world,
        readers=world.data.local_batches,
        on_accelerator=not world.device.is_slot,
    )


def _endless(loader: Any) -> Generator[Batch]:
    """Yield the batches of epoch after epoch."""
    for epoch in itertools.count():
        yield from loader.epoch(epoch, 0)


def _timed(step: Step, batches: Iterator[Batch], count: int, seed: int) -> tuple[float, int]:
    """Return the seconds of ``count`` updates on rank 0, and their samples; the same on every rank."""
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
