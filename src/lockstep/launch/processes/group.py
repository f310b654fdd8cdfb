"""The process group of a world: a process joins it, or takes up one that is there, and leaves it.

This is the only place that makes process groups.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lockstep.launch import cores
from lockstep.launch.devices import Device
from lockstep.launch.world import World, enter, place_of


def default_backend(device: Device) -> str:
    """Return NCCL for CUDA devices, gloo for CPU devices, PyTorch's default for others."""
    if device.is_slot or device.type == "mps":
        return "gloo"
    return str(dist.get_default_backend_for_device(device.torch))


def join(world: World, store: Store, timeout: float = 1800.0) -> None:
    """Join the process group of ``world`` and make it the current world.

    The computing thread gets its device's thread limit at once, and is pinned only when the group
    exists.
    """
    device = world.device
    place = place_of(world.devices)
    cores.settle(place)
    world.backend = backends = world.backend or default_backend(device)
    patience = datetime.timedelta(seconds=timeout)
    store.set_timeout(patience)
    if world.backend != "gloo":
        # what the host waits for goes over the CPU: NCCL's collectives don't hold the host
        backends = f"cpu:gloo,{device.type}:{backends}"
    is_bound = world.backend == "nccl" and len(world.devices) == 1
    dist.init_process_group(
        backends,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=patience,
        device_id=device.torch if is_bound else None,
    )
    world.barrier()
    cores.pin(place)
    cores.share_threads(world.devices, world.local_size)
    enter(world)


def adopt(world: World) -> None:
    """Make ``world`` the current one in a process group that somebody else has made, and will
    leave.
    """
    cores.settle(place_of(world.devices))
    backend = str(dist.get_backend())
    world.backend = "gloo" if world.device.is_slot and "gloo" in backend else backend
    world.own_group = False
    enter(world)


def leave(world: World) -> None:
    """Leave the process group, if this world has one, together with the other ranks."""
    if world.backend is not None and dist.is_initialized():
        world.barrier()
        dist.destroy_process_group()
    world.backend = None
    enter(None)
