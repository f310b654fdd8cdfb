"""Whether this machine is ready to train: the checks of ``lockstep doctor``.

Each check looks at one thing that a training needs, and gives a finding. What is wrong, or slows a
training down, has a line on what to do. Nothing is changed on the machine; the check of the disk
writes a file and removes the file again.
"""

from __future__ import annotations

import importlib.util
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
from lockstep.launch.cores import near, note_on_threads
from lockstep.launch.devices import Device, accelerators, slots, usable_cores
from lockstep.launch.world import World
from lockstep.tensors.byte_size import size
from lockstep.version import versions

State = Literal["ok", "note", "wrong"]

_EXTRAS = {
    "tensorboard": "tensorboard",
    "torchmetrics": "metrics",
    "matplotlib": "report",
    "jinja2": "report",
    "onnx": "export",
}
"""Packages that some commands need, and the extra that installs each."""

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
    yield _extras()
    yield _devices()
    yield from _process_groups()
    yield _shared_memory()
    yield _disk(folder)
    yield _threads()
    yield from _nodes()


def _extras() -> Finding:
    found = []
    missing = []
    for package, extra in _EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            missing.append(extra)
        else:
            found.append(package)
    if not missing:
        return Finding("optional packages", "ok", ", ".join(found))
    text = f"installed: {', '.join(found) or 'none'}"
    extras = ",".join(dict.fromkeys(missing))
    advice = f'those that are not: pip install "torch-lockstep[{extras}]"'
    return Finding("optional packages", "note", text, advice)


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
    yield _sum("gloo", slots(2))
    gpus = [device for device in accelerators() if device.type == "cuda"]
    if len(gpus) > 1:
        yield _sum("nccl", gpus)


def _sum(backend: str, devices: Sequence[Device]) -> Finding:
    name = f"ranks by {backend}"
    begun = time.monotonic()
    try:
        sums = launch(_rank_sum, list(devices), backend=backend, timeout=_SECONDS)
    except LockstepError as error:
        advice = "a firewall, or a network interface that is down: set GLOO_SOCKET_IFNAME=lo"
        if backend == "nccl":
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
    quota = _quota()
    if quota is not None and quota < cores:
        advice = "more threads than that wait: give the container more CPU, or set OMP_NUM_THREADS"
        return Finding("threads", "note", f"{text}; the container may use {quota:g}", advice)
    note = note_on_threads(slots(1)[0])
    if note is not None:
        return Finding("threads", "note", text, note)
    return Finding("threads", "ok", text)


def _quota() -> float | None:
    """Return the CPUs that a control group leaves this process; None where there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _nodes() -> Iterator[Finding]:
    """Tell which cores are near each accelerator, where the machine has several NUMA nodes."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes < 2:
        yield Finding("NUMA", "ok", "one node")
        return
    cores = usable_cores()
    far = [str(device) for device in accelerators() if near(device) == cores]
    if far:
        advice = "bind the process to the node of its device: numactl --cpunodebind"
        yield Finding("NUMA", "note", f"{nodes} nodes; unknown for {', '.join(far)}", advice)
        return
    yield Finding("NUMA", "ok", f"{nodes} nodes; each rank computes near its device")
