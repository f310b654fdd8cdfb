"""How much memory a process or a device takes, and whether an error is for lack of memory."""

from __future__ import annotations

import contextlib
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
    return [max(_highest[0], _most_resident())]


def begin_step_peak(world: World) -> None:
    """Count the peak of a step from here on."""
    if world.device.is_slot:
        _highest[0] = max(_highest[0], _most_resident())
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: the most that was resident is what is resident now
    else:
        reset_peak_memory(world)


def step_peak(world: World) -> int | None:
    """Return the most bytes since ``begin_step_peak``: of this process, or of its accelerators;
    None where nothing says so.
    """
    if not world.device.is_slot:
        return sum(peak_memory(world))
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


_highest = [0]
"""The most bytes of this process that were resident before the last ``begin_step_peak``."""


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
