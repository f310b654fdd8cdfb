"""Whether this machine is ready to train: the checks of ``lockstep doctor``.

Each check looks at one thing that a training needs, and gives a finding. What is wrong, or slows a
training down, has a line on what to do. Nothing is changed on the machine; the check of the disk
writes a file and removes the file again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, counted, first_line
from lockstep.launch import launch
from lockstep.launch.cores import note_on_threads
from lockstep.launch.devices import Device, accelerators, slots, usable_cores
from lockstep.launch.processes.group import default_backend
from lockstep.launch.world import World
from lockstep.tensors.byte_size import size
from lockstep.version import versions

State = Literal["ok", "note", "wrong"]

_ELEMENTS = 1 << 20
"""Numbers that the ranks sum: 4 MiB, more than a small container's shared memory has to spare."""

_SECONDS = 60.0
"""Seconds after which a process group that doesn't answer is reported."""

_SHARED = 1 << 30
"""Bytes of shared memory that loader workers of an ordinary training use."""

_WRITTEN = 64 << 20
"""Bytes that the check of the disk writes."""

_SLOW_DISK = 50e6
"""Bytes a second below which checkpoints of ordinary models take noticeable time."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        name: what was checked.
        state: ``"ok"``, ``"note"`` (a training works, and could be faster or lacks an option), or
            ``"wrong"`` (a training fails).
        text: what is there.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: State
    text: str
    advice: str = ""

    def lines(self, width: int = 80) -> list[str]:
        """Return the lines of a terminal of that width."""
        indent = " " * 26
        lines = []
        for text in (f"{self.state:5}  {self.name:17}  {self.text}", indent + self.advice):
            lines += textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False)
        return lines


def findings(folder: Path) -> Iterator[Finding]:
    """Yield what each check finds, as soon as it is known.

    Args:
        folder: where runs are kept.
    """
    yield Finding("versions", "ok", versions())
    yield _devices()
    yield from _process_groups()
    yield _shared_memory()
    yield _disk(folder)
    yield _threads()
    yield _nodes()


def _devices() -> Finding:
    here = accelerators()
    if here:
        return Finding("devices", "ok", f"{len(here)} x {here[0].type}")
    cores = counted(len(usable_cores()), "core")
    if shutil.which("nvidia-smi") is None:
        return Finding("devices", "ok", f"{cores}, no accelerator")
    if torch.version.cuda is None:
        advice = "this torch is built for the CPU only: install one that is built for CUDA"
    else:
        advice = (
            f"torch is built for CUDA {torch.version.cuda}: compare it with the version that "
            "nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES"
        )
    return Finding("devices", "wrong", f"{cores}; PyTorch finds no GPU, nvidia-smi exists", advice)


def _process_groups() -> Iterator[Finding]:
    """Sum tensors over two ranks with each backend that this machine can use."""
    yield _sum(slots(2))
    if len(accelerators()) > 1:
        yield _sum(accelerators())


def _sum(devices: Sequence[Device]) -> Finding:
    backend = default_backend(devices[0])
    name = f"ranks by {backend}"
    begun = time.monotonic()
    try:
        sums = launch(_rank_sum, list(devices), timeout=_SECONDS)
    except LockstepError as error:
        advice = "a firewall, or a network interface that is down: set GLOO_SOCKET_IFNAME=lo"
        if backend != "gloo":
            advice = "run it again with NCCL_DEBUG=INFO, which names what failed"
        return Finding(name, "wrong", first_line(error), advice)
    seconds = time.monotonic() - begun
    expected = sum(range(1, len(devices) + 1))
    if set(sums) != {float(expected)}:
        return Finding(name, "wrong", f"a sum of {expected} came out as {sums}")
    text = f"{len(devices)} ranks start, sum {size(4 * _ELEMENTS)} and end in {seconds:.1f} s"
    return Finding(name, "ok", text)


def _rank_sum(world: World) -> float:
    """Sum the numbers of the ranks, from 1, in a large tensor; return the mean."""
    numbers = torch.full((_ELEMENTS,), world.rank + 1.0, device=world.device.torch)
    dist.all_reduce(numbers)
    return float(numbers.mean())


def _shared_memory() -> Finding:
    name = "shared memory"
    if not os.path.isdir("/dev/shm"):
        return Finding(name, "ok", "this system has no /dev/shm")
    usage = shutil.disk_usage("/dev/shm")
    text = f"{size(usage.free)} of {size(usage.total)} free"
    if usage.free >= _SHARED:
        return Finding(name, "ok", text)
    advice = "loader workers may die: start the container with --shm-size=8g, or --ipc=host"
    return Finding(name, "note", text, advice)


def _disk(folder: Path) -> Finding:
    """Write a file where runs are kept, and time the writing."""
    name = "disk of the runs"
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    block = os.urandom(1 << 20)
    begun = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            for _ in range(_WRITTEN // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        advice = "give --folder a place that can be written"
        return Finding(name, "wrong", f"{parent}: {error.strerror}", advice)
    speed = _WRITTEN / (time.monotonic() - begun)
    free = shutil.disk_usage(parent).free
    text = f"{parent}: {size(speed)}/s, {size(free)} free"
    if speed >= _SLOW_DISK:
        return Finding(name, "ok", text)
    advice = "checkpoints will take long: give --folder a faster disk, or save less often"
    return Finding(name, "note", text, advice)


def _threads() -> Finding:
    cores = len(usable_cores())
    text = f"{counted(cores, 'core')}, torch computes with {torch.get_num_threads()}"
    note = note_on_threads(slots(1)[0])
    if note is not None:
        return Finding("threads", "note", text, note)
    return Finding("threads", "ok", text)


def _nodes() -> Finding:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes < 2:
        return Finding("NUMA", "ok", "one node")
    advice = "bind each process to the node of its device: torchrun --numa-binding, or numactl"
    return Finding("NUMA", "note", f"{nodes} nodes", advice)
