"""The partition: which layers go to which device, found by measuring them, and shown as a table and
a map to paste.

::

    look at one forward  ->  blocks in order of execution  ->  measured  ->  split  ->  a table, a device map
       (trace)                  (estimate)                    (measure)    (split)
"""

from __future__ import annotations

import itertools
import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.launch.memory import free_memory
from lockstep.launch.placement import alone
from lockstep.model.activation_checkpointing import found_blocks
from lockstep.pipelining.device_map import DeviceMap, longest
from lockstep.pipelining.planner.balanced_split import split
from lockstep.pipelining.planner.benchmark import ModelBenchmark
from lockstep.pipelining.planner.blocks import Block, ModelBlocks, block_names, loose_of, map_of
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.schedule import Schedule, one_f_one_b
from lockstep.tensors.byte_size import size

_INDENT = "      "

SLACK = 0.01
"""How much slower the slowest stage may be, as a share, for fewer bytes to go on to the next:
less than noise.
"""


@dataclass(frozen=True, kw_only=True)
class Stage(Block):
    """A run of blocks on a device, and what they cost together.

    Attributes:
        device: that holds it.
        blocks: in the order of execution.
        need: bytes of weights, their gradients, the optimizer's state, and activations of the
            micro-batches that it holds.
        capacity: bytes of the device; None where that isn't known.
    """

    device: Device
    blocks: tuple[Block, ...]
    need: float
    capacity: float | None


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
        """How many times faster than one device, with so many micro-batches that filling and
        draining don't count.
        """
        times: dict[Device, float] = {}
        for stage in self.stages:
            times[stage.device] = times.get(stage.device, 0.0) + stage.time
        slowest = max(times.values())
        return sum(times.values()) / slowest if slowest else 1.0

    def lines(self, width: int = 80) -> list[str]:
        """A bar, the costs and the blocks of each stage, and the map to paste, at most ``width``
        columns wide.
        """
        how = f"measured on {self.stages[0].device}" if self.measured else "estimated, not measured"
        stages = counted(len(self.stages), "stage")
        blocks = counted(len(self.blocks), "block")
        samples = counted(self.samples, "sample")
        lines = textwrap.wrap(f"{stages} of {blocks}; {how}, a micro-batch of {samples}", width)
        slowest = max(stage.time for stage in self.stages) or 1.0
        for number, stage in enumerate(self.stages):
            lines += _stage_lines(number, stage, stage.time / slowest, width)
        if len(self.stages) > 1:
            speed_up = f"at most {self.speed_up:.3g} times as fast as one device"
            lines += textwrap.wrap(speed_up, width)
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", width)
        pasting = "below, for MP and PP; --map takes what is in braces, or a file of it"
        lines += [*textwrap.wrap(pasting, width), ""]
        pasted = f"device_map={json.dumps(self.device_map)}"
        return lines + textwrap.wrap(
            pasted, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _stage_lines(number: int, stage: Stage, share: float, width: int) -> list[str]:
    """A bar as long as the stage's share of the slowest one's time, its costs and its blocks."""
    head = f"stage {number}, {stage.device}  "
    bar = _bar(share, max(4, min(24, width - len(head))))
    costs = (
        f"forward {_milliseconds(stage.forward)}, backward {_milliseconds(stage.backward)}, "
        f"weights {size(stage.parameters)}, activations {size(stage.activations)}"
    )
    blocks = stage.name
    if len(stage.blocks) > 1:
        blocks += f", {len(stage.blocks)} blocks"
    if stage.capacity is not None:
        blocks += f"; {size(stage.need)} of {size(stage.capacity)}"
    lines = [(head + bar).rstrip()]
    for text in (costs, blocks):
        lines += textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return lines


def _bar(share: float, width: int) -> str:
    """A bar of up to ``width`` characters, to an eighth of one."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    if value < 0.0995:
        return f"{seconds * 1e6:.2f} µs" if value < 0.00995 else f"{seconds * 1e6:.3g} µs"
    return f"{value:.3g} ms" if value < 999.5 else f"{value:,.0f} ms"


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

    Each block is timed on the first device, on the job's first batch, and the run of blocks for
    each device is chosen so that the slowest device is as fast as can be, and each fits into its
    memory. Nothing of the job is changed.

    Args:
        job: as in ``train``.
        devices: one for each stage.
        microbatches: that each global batch will be cut in; one of them is what is timed, and 1F1B
            what is held.
        measured: False estimates times from operations and bytes, without a run.
        memory: bytes of each device, or of all; None asks the devices (slots share the machine's
            memory).
        seconds: how long to measure, at least.
        settings: fields of the job that are replaced.

    Raises:
        StrategyError: there are more devices than blocks, or a device is too small for its stage
            (both sizes are said).
        JobError: the job can't be loaded, or its model doesn't take its data.
    """
    if microbatches < 1:
        raise StrategyError(f"partition: {microbatches} micro-batches; there is at least one")
    chosen = _devices.parse(devices)
    loaded = the_job(with_settings(as_job(job), settings))
    loaded = loaded.replace(accumulate=loaded.accumulate * microbatches)
    schedule = one_f_one_b(len(chosen), microbatches)
    return found_for(
        loaded, chosen, schedule, capacities(chosen, memory), measure=measured, seconds=seconds
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
    """Find the partition for a job that is loaded; its first micro-batch is measured.

    The schedule says how many micro-batches a stage holds; without capacities memory isn't looked
    at.
    """
    with alone(tuple(devices[:1])) as world:
        bench = ModelBenchmark(job, world)
        samples = bench.first.size
        blocks = bench.blocks(bench.part(samples), measure=measure, seconds=seconds)
    notes = []
    if measure and not blocks.measured:
        notes.append(
            f"the model with a micro-batch of {samples} doesn't fit on {bench.device}: "
            "times are estimated"
        )
    held = simulate(schedule).held_by_stage()
    return divided(bench, blocks, samples, devices, capacity=capacity, held=held, notes=notes)


def divided(
    bench: ModelBenchmark,
    measured: ModelBlocks,
    samples: int,
    devices: Sequence[Device],
    *,
    given: DeviceMap | None = None,
    capacity: Sequence[float] | None = None,
    held: Mapping[int, float] | None = None,
    notes: Sequence[str] = (),
) -> Partition:
    """The best run of blocks for each stage, or those that a device map says, which need not follow
    one another.

    Args:
        bench: whose blocks they are.
        measured: the blocks, with their costs for a micro-batch of so many samples.
        samples: of it.
        devices: of each stage.
        given: the stage of each layer, where that is known.
        capacity: bytes that each stage may take; None doesn't look at memory.
        held: by stage, how many micro-batches it holds; None is one.
        notes: what a person should know of the measurement.
    """
    blocks = measured.blocks

    def need(stage: int, run: Sequence[Block]) -> float:
        number = 1 if held is None else held[stage]
        return sum(bench.fixed(block) + number * block.activations for block in run)

    if given is None:
        names = list(map(str, devices))
        bounds = split(
            blocks, len(devices), need=need, capacity=capacity, devices=names, slack=SLACK
        )
        runs = [blocks[i:j] for i, j in itertools.pairwise(bounds)]
        device_map = map_of(bench.model, measured, bounds)
    else:
        device_map = dict(given)
        stages = [longest(block.name, given) or 0 for block in blocks]
        runs = [
            tuple(block for block, its in zip(blocks, stages, strict=True) if its == stage)
            for stage in range(len(devices))
        ]
    found = []
    for number, (device, run) in enumerate(zip(devices, runs, strict=True)):
        room = None if capacity is None else capacity[number]
        found.append(_stage(device, run, need(number, run), room))
    again = [
        f'"{block.name}" is called {block.calls} times, and counted where it is called first'
        for block in blocks
        if block.calls > 1 and len(devices) > 1
    ]
    return Partition(device_map, tuple(found), samples, measured.measured, (*notes, *again))


def _stage(device: Device, run: Sequence[Block], need: float, capacity: float | None) -> Stage:
    """A run of blocks on a device."""
    names = [block.name or "the model" for block in run] or ["nothing"]
    return Stage(
        name=" to ".join(dict.fromkeys((names[0], names[-1]))),
        device=device,
        blocks=tuple(run),
        need=need,
        capacity=capacity,
        forward=sum(block.forward for block in run),
        backward=sum(block.backward for block in run),
        parameters=sum(block.parameters for block in run),
        trained=sum(block.trained for block in run),
        activations=sum(block.activations for block in run),
    )


def even_split(model: nn.Module, stages: int, each: int = 1) -> dict[str, int]:
    """A device map by the layers' parameters, in the order in which they were registered, without
    any forward.

    The blocks of a list stay whole where there are enough of them. A device has ``each`` stages.

    Raises:
        StrategyError: there are fewer layers than stages.
    """
    numbers = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
    }
    within_blocks = tuple(f"{name}." for name in found_blocks(model))
    shares = {
        name: number / max(numbers[""], 1)
        for name, number in numbers.items()
        if not name.startswith(within_blocks)
    }
    names = block_names(model, shares)
    if len(names) < stages:
        names = block_names(model, dict.fromkeys(numbers, 1.0))
    if len(names) < stages:
        many = counted(stages, "device")
        fix = "use fewer devices"
        if each > 1:
            many = f"{stages} stages, {each} on each device"
            fix = "use fewer devices, or fewer stages on each"
        raise StrategyError(f"{many}, but the model has layers for {len(names)} only: {fix}")
    counted_once: set[nn.Parameter] = set()  # tied ones
    blocks = []
    for name in names:
        own = set(model.get_submodule(name).parameters()) - counted_once
        counted_once |= own
        blocks.append(Block(name, forward=sum(parameter.numel() for parameter in own)))
    found = ModelBlocks(tuple(blocks), loose_of(model, names, {}))
    return map_of(model, found, split(blocks, stages))


def capacities(devices: Sequence[Device], memory: int | Sequence[int] | None) -> list[float] | None:
    """The bytes of each stage's device; None where PyTorch doesn't tell."""
    number = len(devices)
    if memory is not None:
        sizes = [memory] * number if isinstance(memory, int) else memory
        if len(sizes) != number:
            raise StrategyError(
                f"partition: {len(sizes)} sizes of memory for {number} devices: give one for each"
            )
        return list(map(float, sizes))
    if devices[0].is_slot:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [whole / number] * number
    try:
        return [float(free_memory(device)) for device in devices]
    except RuntimeError:  # its allocator doesn't count
        return None
