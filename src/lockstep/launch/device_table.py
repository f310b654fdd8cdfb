"""What this machine has: the table of ``lockstep devices``, and the lines under every number
that was taken on it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

import lockstep
from lockstep.errors import counted
from lockstep.launch.devices import Device, accelerators, usable_cores
from lockstep.launch.layout import Layout


def table() -> str:
    """Return the name and the memory of each accelerator, and of the CPU with its cores."""
    rows = []
    here = accelerators()
    for device in here:
        rows.append([str(device), _name(device)])
        with contextlib.suppress(RuntimeError, AttributeError):  # not each type of device tells
            free, whole = torch.accelerator.get_memory_info(device.torch)
            rows[-1].append(f"{_gib(whole)} ({_gib(free)} free)")
    cores = len(usable_cores())
    slots = f"up to {counted(cores, 'CPU device')}"
    rows.append(["cpu", _processor(), _gib(_host_memory()), f"{counted(cores, 'core')}, {slots}"])
    lines = []
    for name, *facts in rows:
        text = "  ".join([f"{name:8}", *facts])
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 10)
    if not here:
        lines.append("no accelerator: --devices 2 means two CPU devices, which share its cores")
    return "\n".join(lines)


def _name(device: Device) -> str:
    try:
        return str(torch.get_device_module(device.torch).get_device_name(device.index))
    except AttributeError:
        return device.type


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return "CPU"


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def machine() -> dict[str, Any]:
    """Return what numbers were taken on, for a file that keeps them: processor, cores, memory,
    accelerators, versions.
    """
    here = accelerators()
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(usable_cores()),
        "memory": _gib(_host_memory()),
    }
    if here:
        found["accelerators"] = ", ".join(map(_name, here))
    return {
        **found,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": lockstep.__version__,
    }


def drawn(layout: Layout, devices: Sequence[str], each: int = 1) -> list[str]:
    """Return who holds what and who reads what, with a line for each process.

    Args:
        layout: of a strategy.
        devices: the names of all devices.
        each: how many parts (stages, say) a device holds; they are as far apart as there are devices.
    """
    lines = []
    for process in range(layout.processes):
        first = process * layout.devices_per_process
        held = []
        for number in range(first, first + layout.devices_per_process):
            held.append(f"{devices[number]} {_held(layout, number, each)}")
        reads = _read(layout, process)
        lines.append(f"rank {process}: {', '.join(held)}; {reads}")
    return lines


def _held(layout: Layout, device: int, each: int) -> str:
    """Return what a device holds: ``stage 0 and 2``, ``the whole model``."""
    words: list[str] = []
    rest = device
    for axis, size in reversed(list(layout.axes.items())):
        if axis != "data":
            parts = range(rest % size, size * each, size)
            words.insert(0, f"{axis} {' and '.join(map(str, parts))}")
        rest //= size
    return ", ".join(words) or "the whole model"


def _read(layout: Layout, process: int) -> str:
    """Return what a process reads of each batch: ``local batch 1 of 2``."""
    if layout.local_batches == 1:
        return "the whole batch"
    share = layout.read_by(process)
    which = f"batch {share.rank + 1}"
    if share.local_batches > 1:
        which = f"batches 1 to {share.local_batches}"
    return f"local {which} of {layout.local_batches}"
