"""A launch where torchrun has started the processes: this one is a rank already, and joins the others."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import cloudpickle
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from lockstep import devices as _devices
from lockstep import world as _world
from lockstep.devices import Device
from lockstep.errors import DeviceError, counted
from lockstep.launch import records

T = TypeVar("T")


class Place(NamedTuple):
    """This process's place, as torchrun's environment variables tell it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int


def place() -> Place:
    """Read this process's place; what starts ranks without torchrun may leave out all but the first three."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    node = int(os.environ.get("GROUP_RANK", rank // local_size))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", size // local_size))
    return Place(rank, size, local_rank, local_size, node, nodes)


def device_of_this_rank(chosen: tuple[Device, ...]) -> Device:
    """The device of this process. torchrun says how many processes a node has: slots are cut to that number."""
    here = place()
    if chosen[0].is_slot:
        return _devices.slots(here.local_size)[here.local_rank]
    if here.local_size > len(chosen):
        raise DeviceError(
            f"torchrun started {here.local_size} processes for {counted(len(chosen), 'device')} here: "
            f"use --nproc-per-node {len(chosen)}"
        )
    return chosen[here.local_rank]


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
    here = place()
    world = _world.World(devices=(device,), folder=folder, **here._asdict())
    if on_event is not None:
        world.tell = lambda event: on_event(here.rank, event)
    try:
        _world.join(world, init_method=_meeting(), backend=backend, timeout=timeout)
        result = fn(world, *args)
        # By value, so that results may be of classes that only the script knows.
        results = [pickle.loads(one) for one in world.gather_objects(cloudpickle.dumps(result))]
    except Exception as error:
        # torchrun prints the processes' tracebacks in no order: this line says whose it is. The group is left as it
        # is, since leaving it would wait for ranks that may be gone.
        print(records.head(here.rank, device, world.step, error), file=sys.stderr, flush=True)
        raise
    _leave(world)
    return results


def stay(device: Device) -> _world.World:
    """Make this process a rank for the rest of its life, for a loop of the person's own that has no launch around it.

    A process group that the person has made is taken as it is.
    """
    here = place()
    world = _world.World(devices=(device,), **here._asdict())
    if torch.distributed.is_initialized():
        _devices.limit_threads(device)
        world.backend = torch.distributed.get_backend()
        _world.enter(world)
        return world
    _world.join(world, init_method=_meeting())
    atexit.register(_leave, world)
    return world


def _leave(world: _world.World) -> None:
    """Leave the group, and let gloo's threads come to rest.

    They drop the tensors of the last collective, for which they need Python's lock. Where Python goes away meanwhile,
    that aborts the process ("terminate called without an active exception", torch 2.13).
    """
    _world.leave(world)
    gc.collect()
    time.sleep(0.1)


_meetings = 0
_SCHEME = "lockstep-env"


def _meeting() -> str:
    """An address where the ranks meet as at ``env://``, under keys of this launch's own.

    torchrun's store outlives a process group, and a second group would find the addresses of the first in it.
    """
    global _meetings
    if _meetings == 0:
        register_rendezvous_handler(_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
    _meetings += 1
    return f"{_SCHEME}://{_meetings}"


def _rendezvous(url: str, timeout: datetime.timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    number = urlsplit(url).netloc  # the rest of the address differs from rank to rank
    for store, rank, size in rendezvous("env://", timeout=timeout, **options):
        yield PrefixStore(f"lockstep_{number}", store), rank, size
