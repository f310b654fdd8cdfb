"""Run a function on every rank: in this process, as local processes, or under torchrun.

``launch(fn, devices=4)`` calls ``fn(world, *args)`` once per device and gives the results in rank
order.

Local ranks are forked from one small process of ours (`lockstep.launch.processes.fork`), not
started by ``multiprocessing`` or by PyTorch's elastic agent, for three reasons. It is the one
parent of all ranks, and it hears at once when the person's process ends, even by ``kill -9``, so no
rank outlives it, not even a stopped one. Nothing imports the person's script a second time:
functions travel by value, so a script needs no main guard, and a notebook cell or standard input
will do. And each rank that fails writes a record with the moment of its failure, so the rank that
failed first is the one that is named, rather than one of those that failed for want of it.

`processes` has, in reading order: `local_ranks` (one launch, from here), `supervisor` (its
processes, watched until they end), `call` (what they are given, with `modes` and `pickling`),
`fork_server` and `fork` (the two ends of the process that forks them), `rank` (what a rank does)
and `failure_records` (who failed first). `started_ranks` is the other way to become a rank: by
torchrun.

This module and `lockstep.launch.processes.fork_server` import nothing heavy, so that a command can
start the forking process first and import torch beside it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lockstep.launch.devices import Devices
    from lockstep.launch.world import World

T = TypeVar("T")

__all__ = ["launch", "started_as_rank"]


def launch(
    fn: Callable[..., T],
    devices: Devices = "auto",
    args: Iterable[Any] = (),
    *,
    folder: str | Path | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    on_output: Callable[[str, str], None] | None = None,
    timeout: float = 1800.0,
    devices_per_rank: int = 1,
) -> list[T]:
    """Call ``fn(world, *args)`` on every rank and give the results in rank order.

    One device (or ``devices_per_rank``): the call is made in this process. Several: each gets a
    process of its own on this machine. Under torchrun this process is one of the ranks, with its
    devices, and each of them returns the same list. Wherever the call is made, the caller's modes
    hold (``no_grad``, ``inference_mode``, ``autocast``).

    Args:
        fn: any function, lambdas and those of a notebook included; what it refers to goes with it.
        devices: as in `lockstep.launch.devices`.
        args: further arguments of ``fn``, the same on every rank.
        folder: where the run keeps its files; what rank N > 0 prints goes to ``ranks/N.log`` in it.
        on_event: called in this process with (rank, event) for each ``world.emit(event)``.
        on_output: called with (text, "stdout" or "stderr") for the lines that rank 0 prints,
            instead of printing them.
        timeout: seconds after which a collective that waits for a rank gives up.
        devices_per_rank: how many neighbours of the devices each rank drives, for ``ddp=2xpp=2`` in
            a loop of your own.

    Raises:
        InputError: ``fn`` or an argument can't be sent to other processes, or this is a rank
            already.
        RankFailed: a rank raised or died. The first one is named; ``__cause__`` is what it raised.
        LockstepError: a rank raised one of Lockstep's own: it comes out as itself.
    """
    from lockstep.launch import devices as _devices
    from lockstep.launch import world as _world

    _world.not_within_a_rank()
    if folder is not None:
        folder = os.path.abspath(folder)
    args = tuple(args)
    chosen = _devices.parse(devices)
    if started_as_rank():
        from lockstep.launch import started_ranks

        chosen = started_ranks.devices_of_this_rank(chosen, devices_per_rank)
        if started_ranks.place().size > 1:
            return started_ranks.run(
                fn, chosen, args, folder=folder, on_event=on_event, timeout=timeout
            )
    if devices_per_rank < 1 or len(chosen) % devices_per_rank:
        from lockstep.errors import DeviceError

        raise DeviceError(
            f"{len(chosen)} devices cannot be divided into ranks of {devices_per_rank}"
        )
    if len(chosen) == devices_per_rank:
        with _world.lone(chosen, folder) as world:
            if on_event is not None:
                world.emit = lambda event: on_event(0, event)
            return [fn(world, *args)]

    from lockstep.launch.processes import local_ranks

    return local_ranks.run(
        fn,
        chosen,
        args,
        folder=folder,
        on_event=on_event,
        on_output=on_output,
        timeout=timeout,
        devices_per_rank=devices_per_rank,
    )


def here(devices: Devices = "auto", devices_per_rank: int = 1) -> World | None:
    """Return the world that this process is in; the one it joins when it first asks, where it was
    started as a rank; or None.

    Args:
        devices: the devices of all ranks; this process takes its own where it joins.
        devices_per_rank: how many it takes.
    """
    from lockstep.launch import devices as _devices
    from lockstep.launch import world as _world

    world = _world.current()
    if world is None and started_as_rank():
        from lockstep.launch import started_ranks

        if started_ranks.place().size > 1:
            its = started_ranks.devices_of_this_rank(_devices.parse(devices), devices_per_rank)
            world = started_ranks.stay(its)
    return world


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_OTHER_STARTERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "MPI": ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
    "SLURM": (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
    ),
}
"""By what starts processes, the variables of the rank, of that on its node, of the number of
processes on the node, and of all (the first set).

What mpirun starts within a SLURM job has SLURM's variables too, of another process; so SLURM is the
last.
"""


def started_as_rank() -> bool:
    """Return whether this process was started as a rank: by torchrun, by what speaks like it, or by
    who made a process group.

    What SLURM or MPI say is put into torchrun's variables, where there is an address to meet at.

    Raises:
        DeviceError: it was started as one of several which can't find one another, and would each
            train alone.
    """
    from lockstep.errors import DeviceError

    if _has_group() or all(name in os.environ for name in _TORCHRUN):
        return True
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(missing) and int(os.environ["WORLD_SIZE"]) > 1:
        raise DeviceError(
            f"this process is one of {os.environ['WORLD_SIZE']} (RANK, WORLD_SIZE), and "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so each "
            "process would train alone: start all with torchrun, or set what is missing; to "
            "train in this process alone, unset RANK"
        )
    refused = ""
    for starter, (rank, local_rank, local_size, *sizes) in _OTHER_STARTERS.items():
        size = next((name for name in sizes if name in os.environ), None)
        if rank not in os.environ or size is None or int(os.environ[size]) == 1:
            continue
        missing = [
            name for name in (local_rank, "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
        ]
        if not missing:
            names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
            if local_size in os.environ:
                names["LOCAL_WORLD_SIZE"] = local_size
            for name, its in names.items():
                # SLURM writes "2(x3)": 2 processes on each of three nodes.
                os.environ[name] = re.split(r"\D", os.environ[its])[0]
            return True
        refused = (
            f"{starter} has started this process as one of {os.environ[size]} ({rank}, {size}), "
            "and each would "
            f"train alone: set {' and '.join(missing)} (docs/clusters.md), or let each node start "
            "torchrun; "
            f"to train in this process alone, unset {rank}"
        )
    if refused:
        raise DeviceError(refused)
    return False


def _has_group() -> bool:
    """Return whether somebody has made a process group of several here."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
