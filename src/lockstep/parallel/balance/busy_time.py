"""Busy: for how many seconds each device or slot computed.

A clock on the wall would count waiting too: for another replica, for the interpreter lock, for whoever else uses the
machine. So a slot is busy while its thread has the processor, and an accelerator while one of its kernels runs::

    with BusyTime() as busy:
        loss_of(model(inputs), targets).backward()
    busy.seconds("cpu:1")   # what slot 1's thread computed
    busy.seconds("cpu")     # what the thread did that called

On a slot of several cores it is the time of the thread that leads the others. NVIDIA's kernels are seen by PyTorch's
profiler, copies between devices among them; of other accelerators nothing is known here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch

from lockstep.launch.devices import Device
from lockstep.threads import thread_context


class BusyTime(contextlib.AbstractContextManager["BusyTime"]):
    """Counts between the beginning and the end of a ``with``, in this thread and in all that compute for it.

    Args:
        caller: whose time this thread's is; that of threads that only start an accelerator's work is added to it.
    """

    def __init__(self, caller: Device | str = "cpu") -> None:
        self._caller = str(caller)
        self._lock = threading.Lock()
        self._seconds: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> BusyTime:
        if torch.cuda.is_available():
            self._stack.enter_context(self._kernels())
        self._stack.enter_context(thread_context.followed_by(self._thread_of))
        self._stack.enter_context(self._thread(self._caller))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def seconds(self, owner: Device | str) -> float:
        """Those of one owner: ``"cpu:0"``, ``"cuda:1"``."""
        return float(self._seconds[str(owner)])

    def owners(self) -> list[str]:
        """Who computed at all."""
        return sorted(self._seconds)

    def _thread_of(self, device: Device) -> contextlib.AbstractContextManager[None]:
        return self._thread(str(device) if device.is_slot else self._caller)

    @contextlib.contextmanager
    def _thread(self, owner: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            with self._lock:
                self._seconds[owner] += spent  # type: ignore[assignment]  # a Counter of seconds

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        _wait_for_cards()  # what was started before isn't counted
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            try:
                yield
            finally:
                _wait_for_cards()
        spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in profile.events() or ():
            # A named part of the program spans the gaps between its kernels too.
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                spans[event.device_index].append((event.time_range.start, event.time_range.end))
        for index, found in spans.items():
            self._seconds[f"cuda:{index}"] += covered(found) / 1e6  # type: ignore[assignment]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these (beginning, end) lasted: kernels of two streams may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _wait_for_cards() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
