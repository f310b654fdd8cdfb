"""How much memory a process or a device takes, and whether an error is for lack of memory."""

from __future__ import annotations

import resource
import sys

import torch

from lockstep.launch.devices import Device
from lockstep.launch.world import World


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is for lack of memory, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "allocate memory" in str(error) or "DefaultCPUAllocator: not enough memory" in str(error)


def peak_memory(world: World) -> list[int]:
    """Per process, since it began; on accelerators per device, since the last
    ``reset_peak_memory``.
    """
    if not world.device.is_slot:
        return [torch.accelerator.max_memory_allocated(d.torch) for d in world.devices]
    return [_most_resident()]


def _most_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(world: World) -> None:
    """Count peaks of accelerators from here on: planning and building take memory that the
    training doesn't.
    """
    if torch.accelerator.is_available():
        for device in world.devices:
            if not device.is_slot:
                torch.accelerator.reset_peak_memory_stats(device.torch)


def memory_now(world: World) -> tuple[tuple[str, int], ...]:
    """By the name of a device, or of this process: the bytes that it takes at present."""
    if world.device.is_slot:
        return ((str(world.device) if world.size > 1 else "memory", _resident()),)
    return tuple((str(d), torch.accelerator.memory_allocated(d.torch)) for d in world.devices)


def free_memory(device: Device) -> int:
    """Bytes of an accelerator that tensors may still take: the system's, and what this process's
    allocator has kept.
    """
    kept = torch.accelerator.memory_reserved(device.torch)
    taken = torch.accelerator.memory_allocated(device.torch)
    free, _ = torch.accelerator.get_memory_info(device.torch)
    return free + kept - taken


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
