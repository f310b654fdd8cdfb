"""Level: how evenly a step loads its devices, in bytes and in time.

A data-parallel step is as slow as its busiest device, and its batch as large as the fullest one can
hold. PyTorch's DataParallel gathers outputs on the first device and computes the loss there, which
is the fullest then; outputs and losses that stay where they were computed leave all devices level::

    gathered   first device  ████████████████████  share, all outputs, the loss of all, its gradient
               second        ███████               share
    level      first device  ██████████            share, its outputs, their loss, its gradient
               second        ██████████            share, its outputs, their loss, its gradient
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.live_memory import LiveBytes, followed_by
from lockstep.errors import InputError
from lockstep.launch.devices import Device, Devices, parse
from lockstep.report.table import Table

_WIDTH = 80
"""Columns of the table."""


@dataclass(frozen=True)
class Level:
    """What a step asks of each device; ``print`` it for a table.

    Attributes:
        bytes: for each device, by name, the most bytes of tensors that were alive at once, beyond
            those before the step.
        seconds: for each device how long it computed in a step.
    """

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def fullest(self) -> float:
        """Divide the bytes of the fullest device by the mean of all: 1.0 is level."""
        return _most_to_mean(self.bytes)

    @property
    def busiest(self) -> float:
        """Divide the seconds of the busiest device by the mean of all: 1.0 is level."""
        return _most_to_mean(self.seconds)

    def __str__(self) -> str:
        rows = []
        for name, count in self.bytes.items():
            peak = f"{count / 1e6:,.1f} MB"
            busy = f"{self.seconds[name]:.3f} s"
            rows.append([name, peak, busy])
        rows.append(["most to mean", f"{self.fullest:.2f}", f"{self.busiest:.2f}"])
        table = Table(["", "peak", "busy"], rows)
        return "\n".join(table.lines(_WIDTH))


def level_of(step: Callable[[], object], devices: Devices = None, *, repeat: int = 3) -> Level:
    """Measure what ``step`` asks of each device.

    It is called once uncounted (replicas and optimizer state are made then), once for the bytes,
    and ``repeat`` times for the seconds, whose least is taken. On CPU devices what the calling
    thread makes and computes is the first one's, as the first accelerator has it: gathered outputs,
    their loss, the optimizer's update. On accelerators it is nobody's.

    Args:
        step: a whole update, say, on a batch that is there already. What it changes stays changed.
        devices: those that it computes on, as ``lockstep.launch.devices.parse`` reads them, or a
            list.
        repeat: how often it is timed.

    Raises:
        InputError: it isn't to be timed at all.
        DeviceError: devices that don't exist.

    Example::

        step = lockstep.parallelize(model, loss, optimizer, strategy="dp", devices="2xcpu")
        print(level_of(lambda: step(inputs, targets), "2xcpu"))
    """
    if repeat < 1:
        raise InputError(f"repeat {repeat}: a step is timed at least once")
    places = tuple(dict.fromkeys(parse(devices)))
    step()
    live = peaks_of(step, places)
    timings = []
    for _ in range(repeat):
        with busy_seconds(_caller_of(places)) as busy:
            step()
        timings.append(busy)
    seconds = {}
    for name in live:
        seconds[name] = min(float(busy[name]) for busy in timings)
    return Level(live, seconds)


def peaks_of(step: Callable[[], object], devices: tuple[Device, ...]) -> dict[str, int]:
    """Find the peak of live bytes on each device during one call of ``step``."""
    with LiveBytes(_caller_of(devices)) as live:
        step()
    return {str(device): live.peak(device) for device in devices}


def _caller_of(devices: tuple[Device, ...]) -> str:
    """Name who the calling thread works for: the first slot."""
    return str(devices[0]) if devices[0].is_slot else "cpu"


def _most_to_mean(found: Mapping[str, float]) -> float:
    mean = sum(found.values()) / len(found)
    return max(found.values()) / mean if mean else 1.0


@contextlib.contextmanager
def busy_seconds(caller: str = "cpu") -> Iterator[Counter[str]]:
    """Count for how many seconds each device computed, by name, inside a ``with``: of this thread
    and of its helpers.

    A clock on the wall would count waiting too: for another replica, for the interpreter lock, for
    whoever else uses the machine. So a slot is busy while its thread has the processor (of several
    cores that of the thread that leads), and an accelerator while one of its kernels runs, copies
    among them. Nothing is known of types that PyTorch doesn't profile.

    Args:
        caller: whose time this thread's is; that of threads that only start an accelerator's work
            is added to it.
    """
    seconds: Counter[str] = Counter()
    lock = threading.Lock()

    @contextlib.contextmanager
    def counted(owner: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            with lock:
                seconds[owner] += spent  # type: ignore[assignment]  # a Counter of seconds

    with contextlib.ExitStack() as stack:
        kind = torch.accelerator.current_accelerator(check_available=True)
        activity = getattr(torch.profiler.ProfilerActivity, str(kind).upper(), None)
        if activity in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
            stack.enter_context(_kernels_counted(seconds, activity))

        def counted_on(device: Device) -> contextlib.AbstractContextManager[None]:
            return counted(str(device) if device.is_slot else caller)

        stack.enter_context(followed_by(counted_on))
        stack.enter_context(counted(caller))
        yield seconds


@contextlib.contextmanager
def _kernels_counted(seconds: Counter[str], activity: Any) -> Iterator[None]:
    _wait_for_all()  # what was started before isn't counted
    # (Of its one cycle.)
    profiler = torch.profiler.profile(activities=[activity], acc_events=True)
    with profiler as profile:
        try:
            yield
        finally:
            _wait_for_all()
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in profile.events() or ():
        # A named part of the program spans the gaps between its kernels too.
        if event.device_type.name == activity.name and not event.is_user_annotation:
            times = event.time_range
            spans[event.device_index].append((times.start, times.end))
    for index, found in spans.items():
        name = f"{activity.name.lower()}:{index}"
        seconds[name] += covered(found) / 1e6  # type: ignore[assignment]


def _wait_for_all() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Count how long at least one of these (beginning, end) lasted: kernels of two streams may
    overlap.
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
