"""A launch where others have started the processes: this one is a rank already, and joins the others.

That is torchrun, what sets the same environment variables, or a person's own code that has made a process group.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import gc
import itertools
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import cloudpickle
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lockstep.errors import DeviceError, LockstepError, counted
from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.processes import failure_records
from lockstep.launch.world import World

T = TypeVar("T")


def place() -> World:
    """This process's place among those that were started; its device isn't known yet.

    It is as torchrun's environment variables tell it, or else the process group. What starts ranks without torchrun may
    leave out all variables but the first three. Where there is only a group, every rank has to call this.
    """
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _place_in_group()
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    node = int(os.environ.get("GROUP_RANK", rank // local_size))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", size // local_size))
    return World(rank, size, (), local_rank, local_size, node, nodes)


@functools.cache
def _place_in_group() -> World:
    """Which of the ranks are on this machine is asked of all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, size, (), here.index(rank), len(here), nodes.index(hosts[rank]), len(nodes))


def device_of_this_rank(chosen: tuple[Device, ...]) -> Device:
    """The device of this process. It is known how many processes a node has: slots are cut to that number."""
    here = place()
    if chosen[0].is_slot:
        return _devices.slots(here.local_size)[here.local_rank]
    if here.local_size > len(chosen):
        raise DeviceError(
            f"{here.local_size} processes were started for {counted(len(chosen), 'device')} here: "
            f"start {len(chosen)} (torchrun --nproc-per-node {len(chosen)})"
        )
    return chosen[here.local_rank]


def from_first(find: Callable[[], T]) -> T:
    """What ``find`` gives on rank 0, or raises there, on every rank; before or after they have a process group."""
    here = place()
    found: Any = None
    if here.rank == 0:
        try:
            found = find(), None
        except LockstepError as error:
            found = None, error
    if dist.is_initialized():
        box = [found]
        dist.broadcast_object_list(box)
        (found,) = box
    elif here.size > 1:
        store = _store(1800.0)
        if here.rank == 0:
            store.set("found", cloudpickle.dumps(found))
        found = pickle.loads(store.get("found"))
    result, failed = found
    if failed is not None:
        raise failed
    return cast("T", result)


def restarts() -> int:
    """How many times torchrun has started this process's group again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def run(
    fn: Callable[..., T],
    device: Device,
    args: tuple[Any, ...],
    *,
    backend: str | None,
    folder: str | None,
    on_event: Callable[[int, Any], None] | None,
    timeout: float,
) -> list[T]:
    """Call ``fn(world, *args)`` in this process, and give every rank's result; see `lockstep.launch.launch`."""
    world = replace(place(), devices=(device,), folder=folder)
    if on_event is not None:
        world.tell = lambda event: on_event(world.rank, event)
    try:
        _join(world, backend=backend, timeout=timeout)
        result = fn(world, *args)
        # By value, so that results may be of classes that only the script knows.
        results = [pickle.loads(one) for one in world.gather_objects(cloudpickle.dumps(result))]
    except Exception as error:
        # torchrun prints the processes' tracebacks in no order: this line says whose it is. The group is left as it
        # is, since leaving it would wait for ranks that may be gone.
        head = f"rank {world.rank} ({device}) failed {failure_records.when(world.step)}"
        print(f"{head}: {failure_records.reason(error)}", file=sys.stderr, flush=True)
        raise
    if world.own_group:
        _leave(world)
    else:
        _world.enter(None)
    return results


def stay(device: Device) -> World:
    """Make this process a rank for the rest of its life, for a loop of a person's own without a launch around it."""
    world = replace(place(), devices=(device,))
    _join(world)
    if world.own_group:
        atexit.register(_leave, world)
    return world


def _join(world: World, *, backend: str | None = None, timeout: float = 1800.0) -> None:
    """Join the others; a process group that a person has made is taken as it is."""
    if dist.is_initialized():
        _world.adopt(world)
    else:
        _world.join(world, _store(timeout), backend=backend, timeout=timeout)


_stores = itertools.count(1)


def _store(timeout: float) -> Store:
    """Torchrun's store, under keys of this launch's own.

    It outlives a process group, and the ranks: a second group, or ranks that were started again, would find the
    addresses of the first in it.
    """
    store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
    return PrefixStore(f"lockstep_{restarts()}_{next(_stores)}", store)


def _leave(world: World) -> None:
    """Leave the group, and let gloo's threads come to rest.

    They drop the tensors of the last collective, for which they need Python's lock. Where Python goes away meanwhile,
    that aborts the process ("terminate called without an active exception", torch 2.13).
    """
    _world.leave(world)
    gc.collect()
    time.sleep(0.1)
