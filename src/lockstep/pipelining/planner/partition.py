"""The partition: which layers go to which device, found by measuring them, and shown as a table and a map to paste.

::

    look at one forward  ->  blocks in order of execution  ->  measured  ->  split  ->  a table, a device map
       (trace)                  (estimate)                    (measure)    (split)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data import Part, job_loader, resolve
from lockstep.errors import StrategyError
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.placement import alone
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.loss import Totalled
from lockstep.model.precision import Precision, converted_loss
from lockstep.pipelining.planner.block_timing import contention as _contention
from lockstep.pipelining.planner.block_timing import measured as _measured
from lockstep.pipelining.planner.blocks import Block, device_map
from lockstep.pipelining.planner.cost_estimate import Look, blocks_of
from lockstep.pipelining.planner.partition_table import lines_of
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.planner.split import split
from lockstep.pipelining.planner.trace import trace
from lockstep.pipelining.schedule import Schedule, one_f_one_b
from lockstep.tensors.pytree import call, to_device

SLACK = 0.01
"""How much slower the slowest stage may be, as a share, for fewer bytes to go on to the next: less than noise."""


@dataclass(frozen=True)
class Stage:
    """A run of blocks, and what it costs.

    Attributes:
        device: that holds it.
        blocks: in order of execution.
        need: bytes: parameters, their gradients, the optimizer's state, the activations of the micro-batches it holds.
        capacity: bytes of the device; None where that isn't known.
    """

    device: Device
    blocks: tuple[Block, ...]
    need: float
    capacity: float | None

    @property
    def forward(self) -> float:
        """Seconds of a micro-batch's forward."""
        return sum(block.forward for block in self.blocks)

    @property
    def backward(self) -> float:
        """Seconds of a micro-batch's backward."""
        return sum(block.backward for block in self.blocks)

    @property
    def time(self) -> float:
        """Both."""
        return self.forward + self.backward

    @property
    def parameters(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(block.parameters for block in self.blocks)

    @property
    def activations(self) -> int:
        """Bytes that a micro-batch leaves for backward."""
        return sum(block.activations for block in self.blocks)


@dataclass(frozen=True)
class Partition:
    """Which layers go to which device.

    Attributes:
        device_map: prefixes of names and their stages, for the strategies ``mp`` and ``pp``.
        stages: in order.
        samples: of the micro-batch that was measured.
        measured: whether times were measured, or estimated.
        notes: what a person should know.
    """

    device_map: dict[str, int]
    stages: tuple[Stage, ...]
    samples: int
    measured: bool
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block, in order of execution."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def speed_up(self) -> float:
        """How many times faster than one device, with so many micro-batches that filling and draining don't count."""
        times: dict[Device, float] = {}
        for stage in self.stages:
            times[stage.device] = times.get(stage.device, 0.0) + stage.time
        slowest = max(times.values())
        return sum(times.values()) / slowest if slowest else 1.0

    def lines(self, width: int = 80) -> list[str]:
        """A table with a bar for each stage, and the map to paste."""
        return lines_of(self, width)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def partition(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    devices: Devices = "auto",
    microbatches: int = 1,
    measured: bool = True,
    memory: int | Sequence[int] | None = None,
    seconds: float = 1.0,
    **settings: Any,
) -> Partition:
    """Find out which layers of a job's model should go to which device::

        found = lockstep.partition("job.py", devices=2)
        print(found)               # a table
        found.device_map           # {"stem": 0, "layer1": 0, "layer2": 1, ...}

    Each block is timed on the first device, on the job's first batch, and the run of blocks for each device is chosen
    so that the slowest device is as fast as can be, and each fits into its memory. Nothing of the job is changed.

    Args:
        job: as in ``train``.
        devices: one for each stage.
        microbatches: that each global batch will be cut in; one of them is what is timed, and 1F1B what is held.
        measured: False estimates times from operations and bytes, without a run.
        memory: bytes of each device, or of all; None asks the devices (slots share the machine's memory).
        seconds: how long to measure, at least.
        settings: fields of the job that are replaced.

    Raises:
        StrategyError: there are more devices than blocks, or a device is too small for its stage (both sizes are said).
        JobError: the job can't be loaded, or its model doesn't take its data.
    """
    if microbatches < 1:
        raise StrategyError(f"partition: {microbatches} micro-batches; there is at least one")
    chosen = _devices.parse(devices)
    loaded = the_job(with_settings(as_job(job), settings))
    return found_for(
        loaded.replace(accumulate=loaded.accumulate * microbatches),
        chosen,
        one_f_one_b(len(chosen), microbatches),
        capacities(chosen, memory),
        measure=measured,
        seconds=seconds,
    )


def found_for(
    job: Job,
    devices: Sequence[Device],
    schedule: Schedule,
    capacity: Sequence[float] | None,
    *,
    measure: bool = True,
    seconds: float = 1.0,
) -> Partition:
    """As ``partition``, for a job that is loaded.

    Args:
        job: its first micro-batch is what is looked at.
        devices: one for each stage.
        schedule: says how many micro-batches a stage holds.
        capacity: bytes of each device; None doesn't look at memory.
        measure: False estimates times.
        seconds: how long to measure.
    """
    job = job.replace(loader_workers=0)
    with alone(tuple(devices[:1])) as world:
        bench = Bench(job, build_model(job, world), world)
        part = first_part(job, world)
        blocks, seen, timed = bench.blocks(part, measure=measure, seconds=seconds)
        found = divided(bench, blocks, seen, devices, capacity, simulate(schedule).held_by_stage())
    if measure and not timed:
        doubt = f"the model with a micro-batch of {part.size} doesn't fit on {bench.device}: times are estimated"
        found = replace(found, notes=(doubt, *found.notes))
    return replace(found, samples=part.size, measured=timed)


def first_part(job: Job, world: World) -> Part:
    """The job's first micro-batch."""
    loader = job_loader(job, world, resolve(job.train_data, world, "train_data"))
    try:
        batch = next(iter(loader.epoch(0)))
    finally:
        loader.close()
    return batch.parts[0]


class Bench:
    """A model with all that a step of it needs, to be looked at and timed.

    Args:
        job: whose settings count.
        model: on the device, in the mode in which it trains.
        world: with the one device.
    """

    def __init__(self, job: Job, model: nn.Module, world: World) -> None:
        self.model = model
        self.device = world.device
        self.state_copies = state_copies(job)
        self._job = job
        self._loss = Totalled.of(converted_loss(job.loss, job.precision))
        self._precision = Precision(job.precision, world.device.type)

    def copied(self) -> Bench:
        """The same with a copy of the model, for what changes one: a job may give the same model every time."""
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model)
        return found

    def fixed(self, block: Block) -> float:
        """Bytes that a block takes besides activations: parameters, their gradients, the optimizer's state."""
        return block.parameters + (1 + self.state_copies) * block.trained

    def placed(self, part: Part) -> Part:
        """The part on the device, in the job's format and layout."""
        device, dtype = self.device.torch, self._precision.whole
        inputs = to_device(part.inputs, device, dtype, channels_last=self._job.channels_last)
        return Part(inputs, to_device(part.targets, device, dtype), part.size, part.of)

    def blocks(
        self, part: Part, *, measure: bool, seconds: float, adds: bool = False
    ) -> tuple[list[Block], Look, bool]:
        """The blocks with their costs for a part, what was seen of the forward, and whether times are measured.

        Whether backward ``adds`` to gradients says whether the part is one of several of a batch. Where the model and
        the part don't fit on the device, they are estimated.
        """
        part = self.placed(part)

        def forward(inputs: Any) -> Any:
            with self._precision.autocast():
                return call(self.model, inputs)

        seen = blocks_of(self.model, trace(self.model, part.inputs, forward, self.device.type))

        if measure:
            try:
                blocks = _measured(self.model, seen.blocks, self.total(part), self.device, adds=adds, seconds=seconds)
                return blocks, seen, True
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        return list(seen.blocks), seen, False

    def contention(self, part: Part, devices: Sequence[Device]) -> float:
        """How many times longer a part takes while another of these devices computes; 1 on accelerators."""
        if len(devices) < 2 or not self.device.is_slot:
            return 1.0
        try:
            placed = self.placed(part)
            # A model that keeps something of its forward can't be called by two threads at once.
            return _contention(self.model, self.total(placed), self.copied().total(placed), devices)
        except Exception:  # what can't be called by two threads at once says so in training
            return 1.0

    def total(self, part: Part) -> Callable[[], torch.Tensor]:
        """One forward of a part and its loss."""

        def total() -> torch.Tensor:
            with self._precision.autocast():
                return self._loss(call(self.model, part.inputs), part.targets, part.size)[0]

        return total


def divided(
    bench: Bench,
    blocks: Sequence[Block],
    seen: Look,
    devices: Sequence[Device],
    capacity: Sequence[float] | None,
    held: Mapping[int, float],
) -> Partition:
    """The best run of blocks for each stage.

    Args:
        bench: whose blocks they are.
        blocks: with their costs.
        seen: where the parameters outside of blocks are used.
        devices: of each stage.
        capacity: bytes that each stage may take; None doesn't look at memory.
        held: by stage, how many micro-batches it holds.
    """

    def need(stage: int, first: int, last: int) -> float:
        return sum(bench.fixed(b) + held[stage] * b.activations for b in blocks[first:last])

    bounds = split(
        blocks,
        len(devices),
        need=None if capacity is None else need,
        capacity=capacity or (),
        devices=list(map(str, devices)),
        slack=SLACK,
    )
    stages = tuple(
        Stage(device, tuple(blocks[i:j]), need(s, i, j), None if capacity is None else capacity[s])
        for s, (device, i, j) in enumerate(zip(devices, bounds[:-1], bounds[1:], strict=True))
    )
    notes = [
        f'"{block.name}" is called {block.calls} times, and counted where it is called first'
        for block in blocks
        if block.calls > 1 and len(devices) > 1
    ]
    return Partition(map_of(bench.model, seen, bounds), stages, 0, False, tuple(notes))


def map_of(model: nn.Module, seen: Look, bounds: Sequence[int]) -> dict[str, int]:
    """The device map of a split."""

    def stage(place: int) -> int:
        return next(s for s, end in enumerate(bounds[1:]) if place < end)

    by_name = {block.name: stage(place) for place, block in enumerate(seen.blocks)}
    return device_map(model, {**by_name, **{name: stage(place) for name, place in seen.loose.items()}})


def state_copies(job: Job) -> float:
    """How many times its parameters the job's optimizer keeps beside them: 0 for SGD, 1 with momentum, 2 for Adam.

    It is asked with one small parameter; where it won't take that, it is taken for Adam.
    """
    probe = nn.Parameter(torch.zeros(8))
    try:
        optimizer = job.optimizer([("weight", probe)])
        probe.grad = torch.ones(8)
        optimizer.step()
        kept = optimizer.state.get(probe, {}).values()
        return sum(t.numel() for t in kept if isinstance(t, torch.Tensor) and t.numel() > 1) / probe.numel()
    except Exception:  # groups by name, say, which this parameter isn't in
        return 2.0


def capacities(devices: Sequence[Device], memory: int | Sequence[int] | None) -> list[float] | None:
    """The bytes of each stage's device."""
    if memory is not None:
        sizes = [memory] * len(devices) if isinstance(memory, int) else list(memory)
        if len(sizes) != len(devices):
            raise StrategyError(
                f"partition: {len(sizes)} sizes of memory for {len(devices)} devices: give one for each"
            )
        return [float(byte) for byte in sizes]
    if devices[0].type == "cuda":
        return [float(torch.cuda.get_device_properties(device.index).total_memory) for device in devices]
    if devices[0].is_slot:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)] * len(devices)
    return None
