"""How much memory a process or a device takes, and whether an error says that it was not enough."""

from __future__ import annotations

import resource
import sys

import torch

from lockstep.launch.world import World


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "allocate memory" in str(error) or "DefaultCPUAllocator: not enough memory" in str(error)


def peak_memory(world: World) -> list[int]:
    """Per process; on CUDA devices, per device."""
    if world.device.type == "cuda":
        return [torch.cuda.max_memory_allocated(d.index) for d in world.devices]
    scale = 1 if sys.platform == "darwin" else 1024
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale]


def memory_now(world: World) -> tuple[tuple[str, int], ...]:
    """By the name of a device, or of this process: the bytes that it takes at present."""
    if world.device.is_slot:
        return ((str(world.device) if world.size > 1 else "memory", _resident()),)
    return tuple((str(d), torch.cuda.memory_allocated(d.index)) for d in world.devices if d.type == "cuda")


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
