"""A launch where others have started the processes: this one is a rank already, and joins the
others.

That is torchrun, what sets the same environment variables, SLURM or MPI whose variables are read as
these, or a person's own code that has made a process group.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import functools
import gc
import ipaddress
import itertools
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.utils.store import get_all
from torch.distributed.rendezvous import rendezvous

from lockstep.errors import DeviceError, LockstepError, counted
from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device, Devices
from lockstep.launch.processes import failure_records, group
from lockstep.launch.world import World

T = TypeVar("T")


def place() -> World:
    """This process's place among those that were started; its device isn't known yet.

    It is as torchrun's environment variables have it, or else the process group. What starts ranks
    without torchrun may leave out all variables but the first three. Where there is only a group,
    every rank has to call this.
    """
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _place_in_group()
    rank, size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(rank, size, (), local_rank, local_size)


@functools.cache
def _place_in_group() -> World:
    """Ask all ranks which of them are on this machine."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, size, (), here.index(rank), len(here))


def devices_of_this_rank(chosen: tuple[Device, ...], each: int = 1) -> tuple[Device, ...]:
    """Return the devices of this process. It is known how many processes a node has: slots are cut
    to that number.

    Args:
        chosen: those of this node.
        each: how many a process drives.

    Raises:
        DeviceError: there are fewer than the processes need.
    """
    here = place()
    wanted = here.local_size * each
    if chosen[0].is_slot:
        chosen = _devices.slots(wanted)
    elif wanted > len(chosen):
        if each == 1 and _sees_only_its_own():
            return chosen[:1]
        of = f" with {each} devices each" if each > 1 else ""
        most = len(chosen) // each
        fewer = f"start {most} (torchrun --nproc-per-node {most}), or " if most else ""
        raise DeviceError(
            f"{here.local_size} processes{of} were started for {counted(len(chosen), 'device')} "
            f"here: {fewer}name {wanted} devices"
        )
    return chosen[here.local_rank * each : (here.local_rank + 1) * each]


def refuse_other_number(devices: Devices, each: int) -> None:
    """Refuse a number of devices that the processes which were started on this node don't have.

    A process group that a person has made may be of processes with a device of their own each.

    Args:
        devices: as the person gave them.
        each: how many a process drives.

    Raises:
        DeviceError: with the number that they have.
    """
    is_counted = any(letter.isdigit() for letter in str(devices))
    if not is_counted or "LOCAL_RANK" not in os.environ or _sees_only_its_own():
        return
    processes = place().local_size
    wanted = processes * each
    number = int(str(devices)) if str(devices).isdigit() else len(_devices.parse(devices))
    if number != wanted:
        raise DeviceError(
            f"devices: {counted(processes, 'process', 'es')} with {counted(each, 'device')} each "
            f"were started for {counted(number, 'device')} here: give {wanted}, or leave devices out"
        )


def read_by_first(read: Callable[[], T]) -> T:
    """Return what rank 0 reads, on every rank: another node may not see the disk. What it raises,
    all raise.
    """
    here = place()
    if here.size == 1:
        return read()
    value: Any = None
    if here.rank == 0:
        try:
            value = read()
        except LockstepError as error:
            value = error
    if not dist.is_initialized():
        _choose_interface(here)
    store = _store(1800.0)
    store.set(f"read/{here.rank}", cloudpickle.dumps(value))
    # Rank 0, whose process may serve the store, waits until all have it.
    value = pickle.loads(get_all(store, here.rank, "read/", here.size)[0])
    if isinstance(value, LockstepError):
        raise value
    result: T = value
    return result


def _sees_only_its_own() -> bool:
    """Return whether this process was given one accelerator of its node's (``srun
    --gpus-per-task=1``).

    Under torchrun all processes of a node see the same ones, so there one for several is a mistake.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ","
    return "," not in seen and "TORCHELASTIC_RUN_ID" not in os.environ


def restarts() -> int:
    """Return how many times torchrun has started this process's group again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def run(
    fn: Callable[..., T],
    devices: tuple[Device, ...],
    args: tuple[Any, ...],
    *,
    folder: str | None,
    on_event: Callable[[int, Any], None] | None,
    timeout: float,
) -> list[T]:
    """Call ``fn(world, *args)`` in this process, and give every rank's result; see
    `lockstep.launch.launch`.
    """
    world = replace(place(), devices=devices, folder=folder)
    if on_event is not None:
        world.emit = lambda event: on_event(world.rank, event)
    try:
        _join(world, timeout)
        with world.at_end:
            result = fn(world, *args)
        # By value, so that results may be of classes that only the script knows.
        results = [pickle.loads(one) for one in world.gather_objects(cloudpickle.dumps(result))]
    except Exception as error:
        # torchrun prints the processes' tracebacks in no order: this line names the rank. The
        # group is left as it is, since leaving it would wait for ranks that may be gone.
        who = f"rank {world.rank} ({', '.join(map(str, devices))})"
        when = failure_records.when(world.step)
        why = failure_records.reason(error)
        print(f"{who} failed {when}: {why}", file=sys.stderr, flush=True)
        raise
    if world.own_group:
        _leave(world)
    else:
        _world.enter(None)
    return results


def stay(devices: tuple[Device, ...]) -> World:
    """Make this process a rank for the rest of its life, for a loop of a person's own without a
    launch around it.
    """
    world = replace(place(), devices=devices)
    _join(world)
    if world.own_group:
        atexit.register(_leave, world)
    return world


def _join(world: World, timeout: float = 1800.0) -> None:
    """Join the others; a process group that a person has made is taken as it is."""
    if dist.is_initialized():
        group.adopt(world)
    else:
        _choose_interface(world)
        group.join(world, _store(timeout), timeout)


def _choose_interface(world: World) -> None:
    """Let gloo and NCCL of several nodes use the interface on the route to the rendezvous address
    (Linux).

    By itself gloo takes the address of the host's own name. Many systems resolve that to 127.0.1.1,
    and then each rank waits for others that it can't reach. What a person has set is kept.

    Raises:
        DeviceError: the rendezvous address is a loopback address, which no other node reaches.
    """
    # "=": NCCL would take any interface that begins so.
    names = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
    is_chosen = any(name in os.environ for name in names)
    master = os.environ.get("MASTER_ADDR")
    if world.size == world.local_size or master is None or is_chosen or sys.platform != "linux":
        return
    try:
        own = _address_towards(master)
    except OSError:  # IPv6 only, or no such name, which the rendezvous itself will say
        return
    if ipaddress.ip_address(own).is_loopback:
        raise DeviceError(
            f"MASTER_ADDR {master} is a loopback address here, which other nodes can't reach: give "
            "the first node's address in their network (torchrun --master-addr, or --local-addr on "
            "each node), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface there"
        )
    interface = _interfaces().get(own)
    if interface is not None:
        os.environ.update({name: before + interface for name, before in names.items()})


def _address_towards(host: str) -> str:
    """This host's address on the route to another; on that host itself, the very address.
    Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return address


def _interfaces() -> dict[str, str]:
    """From IPv4 address to the network interface that has it as its first."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""

_stores = itertools.count(1)


@functools.cache
def _met(address: str, port: str) -> Store:
    """Return the connection to the store at this address, one for the process's life.

    Without torchrun rank 0 serves it. One that ended and began again between two uses would cut off
    the ranks that came to the second use early.
    """
    store: Store
    store, _, _ = next(rendezvous("env://"))
    return store


def _store(timeout: float) -> Store:
    """Return the store where all processes meet, under keys of this use's own.

    It outlives a process group, and a second group would find the addresses of the first in it;
    torchrun's agent keeps one even when it starts its ranks again.
    """
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        store = _met(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    store.set_timeout(datetime.timedelta(seconds=timeout))
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if by_agent else "0"
    return PrefixStore(f"lockstep_{attempt}_{next(_stores)}", store)


def _leave(world: World) -> None:
    """Leave the group, and let gloo's threads come to rest.

    They drop the tensors of the last collective, for which they need Python's lock. Where Python
    goes away meanwhile, that aborts the process ("terminate called without an active exception",
    torch 2.13).
    """
    group.leave(world)
    gc.collect()
    time.sleep(0.1)
