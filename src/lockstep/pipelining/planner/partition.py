"""The partition: which layers go to which device, found by measuring them, and shown as a table and
a map to paste.

::

    one forward  ->  blocks in order of execution  ->  measured  ->  split  ->  a table, a device map
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.launch.memory import free_memory
from lockstep.pipelining.planner.balanced_split import split
from lockstep.pipelining.planner.blocks import Block, block_names, elements, map_of
from lockstep.pipelining.planner.plan import planned
from lockstep.pipelining.planner.stage_table import Partition

_SLACK_OF_PARAMETERS = 0.2
"""How much larger the largest stage may be, as a share, for a cut between larger modules: parameters
are far from times.
"""


def partition(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    devices: Devices = "auto",
    microbatches: int = 1,
    seconds: float = 1.0,
    **settings: Any,
) -> Partition:
    """Find out which layers of a job's model should go to which device::

        found = lockstep.partition("job.py", devices=2)
        print(found)               # a table
        found.device_map           # {"stem": 0, "layer1": 0, "layer2": 1, ...}

    Each block is timed on the first device, on the job's first batch, and the run of blocks for
    each device is chosen so that the slowest device is as fast as can be. Where the devices' memory
    is too small for these, bytes are divided by the devices' room. Nothing of the job is changed.

    Args:
        job: as in ``train``.
        devices: one for each stage.
        microbatches: that each global batch will be cut in; one of them is what is timed, and 1F1B
            what is held.
        seconds: how long to measure, at least.
        settings: fields of the job that are replaced.

    Raises:
        StrategyError: there are more devices than blocks, or a device is too small for its stage
            (both sizes are in the message; CPU devices share the machine's memory).
        JobError: the job can't be loaded, or its model doesn't take its data.
    """
    if microbatches < 1:
        raise StrategyError(f"partition: {microbatches} micro-batches; there is at least one")
    chosen = _devices.parse(devices)
    asked = with_settings(as_job(job), settings, partition)
    found, _ = planned(
        the_job(asked),
        chosen,
        schedules=["1f1b"],
        microbatches=[microbatches],
        chunks=(1,),
        capacity=capacities(chosen),
        seconds=seconds,
    )
    return found


def even_split(model: nn.Module, stages: int, each: int = 1) -> dict[str, int]:
    """Make a device map by the layers' parameters, in the order in which they were registered,
    without any forward.

    Args:
        model: whose layers they are.
        stages: how many.
        each: how many of them a device has.

    Raises:
        StrategyError: there are fewer layers than stages.
    """
    names = block_names(model, [name for name, _ in model.named_modules()])
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
        blocks.append(Block(name, forward=elements(own)))
    return map_of(model, blocks, split(blocks, stages, slack=_SLACK_OF_PARAMETERS))


def capacities(devices: Sequence[Device]) -> list[float] | None:
    """Give the bytes of each stage's device; None where PyTorch doesn't know them."""
    if devices[0].is_slot:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [whole / len(devices)] * len(devices)
    try:
        return [float(free_memory(device)) for device in devices]
    except RuntimeError:  # its allocator doesn't count
        return None
