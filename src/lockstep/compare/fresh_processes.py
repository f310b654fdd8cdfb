"""A function on every rank of a setup, in processes that end with it: no memory, cache or thread of
one setup is there for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from lockstep.compare.planned_rows import Setup
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.processes.local_ranks import run as run_locally
from lockstep.launch.world import World, place_of
from lockstep.strategies import Strategy, choose
from lockstep.tensors.allocator import keep_freed_memory

T = TypeVar("T")


def in_fresh_processes(
    function: Callable[..., T],
    job: Job | JobFile,
    setup: Setup,
    **settings: Any,
) -> T:
    """Call ``function(world, job, strategy, devices, **settings)`` on every rank of the setup.

    Args:
        function: it comes to the processes as pickling sends it.
        job: the job, or its file, which each process reads for itself.
        setup: its settings are applied to the job.
        settings: what the function is given beside.

    Returns:
        The result of rank 0.

    Raises:
        LockstepError: this setup is refused, or fails.
    """
    chosen = _devices.parse(setup.devices)
    strategy = choose(setup.strategy, chosen, **setup.options)
    is_one = needs_one_process(strategy, chosen)
    found: T = run_locally(
        _on_rank,
        (place_of(chosen),) if is_one else chosen,
        (function, with_settings(job, setup.settings), strategy, chosen, settings),
        backend=None,
        folder=None,
        on_event=None,
        on_output=lambda text, stream: None,
        timeout=1800.0,
        devices_per_rank=1 if is_one else strategy.devices_per_rank,
    )[0]
    return found


def _on_rank(
    world: World,
    function: Callable[..., T],
    source: Job | JobFile,
    strategy: Strategy,
    devices: tuple[Device, ...],
    settings: dict[str, Any],
) -> T:
    job = the_job(source)
    if job.keep_memory:
        keep_freed_memory()  # the process ends with the trial
    with alone(devices) if needs_one_process(strategy, devices) else nullcontext(world) as mine:
        return function(mine, job, strategy, devices, **settings)
