"""The partition: which layers go to which device, found by measuring them, and shown as a table and
a map to paste.

::

    look at one forward  ->  blocks in order of execution  ->  measured  ->  split  ->  a table, a device map
       (trace)                  (estimate)                    (measure)    (split)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
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
from lockstep.pipelining.planner.blocks import Block, ModelBlocks, block_names, loose_of, map_of
from lockstep.pipelining.planner.measured_blocks import ModelBenchmark
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.planner.stage_table import Partition, Stage
from lockstep.pipelining.schedule import Schedule, one_f_one_b

SLACK = 0.01
"""How much slower the slowest stage may be, as a share, for fewer bytes to go on to the next:
less than noise.
"""


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
        memory: bytes of each device, or of all; None asks the devices (CPU devices share the
            machine's memory).
        seconds: how long to measure, at least.
        settings: fields of the job that are replaced.

    Raises:
        StrategyError: there are more devices than blocks, or a device is too small for its stage
            (both sizes are in the message).
        JobError: the job can't be loaded, or its model doesn't take its data.
    """
    if microbatches < 1:
        raise StrategyError(f"partition: {microbatches} micro-batches; there is at least one")
    chosen = _devices.parse(devices)
    asked = with_settings(as_job(job), settings, partition)
    loaded = the_job(asked)
    loaded = loaded.replace(accumulate=loaded.accumulate * microbatches)
    schedule = one_f_one_b(len(chosen), microbatches)
    return found_for(
        loaded,
        chosen,
        schedule,
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
    """Find the partition for a job that is loaded; its first micro-batch is measured.

    Args:
        job: with as many accumulation parts as micro-batches.
        devices: one for each stage.
        schedule: gives the number of micro-batches that a stage holds; each device has one.
        capacity: bytes of each device; None doesn't look at memory.
        measure: False estimates times.
        seconds: how long to measure, at least.
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
    held = simulate(schedule).held()
    return divided(bench, blocks, samples, devices, capacity=capacity, held=held, notes=notes)


def divided(
    bench: ModelBenchmark,
    measured: ModelBlocks,
    samples: int,
    devices: Sequence[Device],
    *,
    given: DeviceMap | None = None,
    capacity: Sequence[float] | None = None,
    held: Sequence[float] | None = None,
    notes: Sequence[str] = (),
) -> Partition:
    """Find the best run of blocks for each stage, or those of a device map, which need not
    follow one another.

    Args:
        bench: whose blocks they are.
        measured: the blocks, with their costs for a micro-batch.
        samples: the size of the micro-batch.
        devices: of each stage.
        given: the stage of each layer, where that is known.
        capacity: bytes that each stage may take; None doesn't look at memory.
        held: how many micro-batches each stage holds; None is one.
        notes: what a person should know of the measurement.
    """
    blocks = measured.blocks

    def need(stage: int, run: Sequence[Block]) -> float:
        number = 1.0
        if held is not None:
            number = held[stage]
        return sum(bench.fixed(block) + number * block.activations for block in run)

    runs: list[list[Block]] = []
    if given is None:
        names = list(map(str, devices))
        bounds = split(
            blocks,
            len(devices),
            need=need,
            capacity=capacity,
            devices=names,
            slack=SLACK,
        )
        for first, last in itertools.pairwise(bounds):
            runs.append(list(blocks[first:last]))
        device_map = map_of(bench.model, measured, bounds)
    else:
        runs = [[] for _ in devices]
        for block in blocks:
            stage = longest(block.name, given) or 0
            runs[stage].append(block)
        device_map = dict(given)
    found = []
    for number, run in enumerate(runs):
        room = None
        if capacity is not None:
            room = capacity[number]
        stage_found = Stage(devices[number], tuple(run), need(number, run), room)
        found.append(stage_found)
    all_notes = list(notes)
    for block in blocks:
        if block.calls > 1 and len(devices) > 1:
            all_notes.append(
                f'"{block.name}" is called {block.calls} times, and counted at its first call'
            )
    return Partition(device_map, tuple(found), samples, measured.measured, tuple(all_notes))


def even_split(model: nn.Module, stages: int, each: int = 1) -> dict[str, int]:
    """Make a device map by the layers' parameters, in the order in which they were registered,
    without any forward.

    The blocks of a list stay whole where there are enough of them.

    Args:
        model: whose layers they are.
        stages: how many.
        each: how many of them a device has.

    Raises:
        StrategyError: there are fewer layers than stages.
    """
    numbers: dict[str, int] = {}
    for name, module in model.named_modules():
        numbers[name] = _elements(module.parameters())
    within_blocks = tuple(f"{name}." for name in found_blocks(model))
    whole = max(numbers[""], 1)
    shares: dict[str, float] = {}
    for name, number in numbers.items():
        if not name.startswith(within_blocks):
            shares[name] = number / whole
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
        module = model.get_submodule(name)
        own = set(module.parameters()) - counted_once
        counted_once |= own
        block = Block(name, forward=_elements(own))
        blocks.append(block)
    loose = loose_of(model, names, {})
    found = ModelBlocks(tuple(blocks), loose)
    bounds = split(blocks, stages)
    return map_of(model, found, bounds)


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    """Count the elements of some parameters together."""
    return sum(parameter.numel() for parameter in parameters)


def capacities(devices: Sequence[Device], memory: int | Sequence[int] | None) -> list[float] | None:
    """Give the bytes of each stage's device; None where PyTorch doesn't know them.

    Args:
        devices: one for each stage.
        memory: bytes of each device, or of all; None asks the devices.

    Raises:
        StrategyError: ``memory`` doesn't have one size for each device.
    """
    number = len(devices)
    if isinstance(memory, int):
        return [float(memory)] * number
    if memory is not None:
        if len(memory) != number:
            raise StrategyError(
                f"partition: {len(memory)} sizes of memory for {number} devices: give one for each"
            )
        return list(map(float, memory))
    if devices[0].is_slot:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [whole / number] * number
    try:
        return [float(free_memory(device)) for device in devices]
    except RuntimeError:  # its allocator doesn't count
        return None
