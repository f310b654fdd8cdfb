"""Threads that stay, a few for each device, and compute at the same time.

A thread made for each call costs more than a small step, and forgets its thread limit: OpenMP's
belongs to the thread that sets it, so a thread here sets its own once, is kept on the cores of its
slot, and waits for the next call, whoever makes it.

::

    run(devices, [f, g])    caller     ──put f, put g──────wait──────┬────────▶ [f(), g()]
                            cpu:0      ······▶ f() ──────────┐       │
                            cpu:1      ········▶ g() ────────┴report─┘
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lockstep.launch import cores
from lockstep.launch.devices import Device
from lockstep.threads.thread_context import Caller

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds that an interrupted caller waits for the threads to come to the end of what they
compute.
"""

Report = tuple[int, Any, BaseException | None]
"""The number of a function, what it returned, and what it raised."""


def run(
    devices: Sequence[Device],
    functions: Sequence[Callable[[], T] | None],
    *,
    role: str = "replica",
    on_abort: Iterable[Callable[[], None]] = (),
) -> list[T | None]:
    """Call each function in a thread of its device, all at the same time, and wait for all.

    They see the caller's grad mode, autocast and context variables. Calls inside calls, and from
    several threads, get threads of their own: they never wait for one another.

    Args:
        devices: where each computes. One device may occur several times.
        functions: one for each device; None lets that device sit out.
        role: what the threads are for, in the notes of errors: ``replica 1 on cpu:1``; "" adds no
            note.
        on_abort: called as soon as one function has raised or the caller was interrupted: they must
            free threads that wait for the failed one (``exchange.abort``, ``barrier.abort``).

    Returns:
        What each returned, in the order of the devices; None for those that sat out.

    Raises:
        Exception: the first that was raised, with its own type and traceback and a note that names
            the device.
    """
    caller = Caller(devices)
    reports: SimpleQueue[Report] = SimpleQueue()
    pairs = zip(devices, functions, strict=True)
    workers = {i: borrowed(device) for i, (device, one) in enumerate(pairs) if one is not None}
    results: list[T | None] = [None] * len(devices)
    failure: BaseException | None = None
    try:
        for i, worker in workers.items():
            worker.tasks.put((reports.put, i, functions[i], caller))
        for _ in workers:
            number, results[number], error = reports.get()
            if error is not None and failure is None:
                failure = error
                if role:
                    error.add_note(f"raised by {role} {number} on {devices[number]}")
                _call_all(on_abort)
            del error
    except BaseException:
        # Ctrl-C: threads can't be stopped, but those that wait are freed, and all end soon.
        _call_all(on_abort)
        _end(workers.values(), _PATIENCE)
        raise
    hand_back(workers.values())
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # else its traceback holds this frame, which holds the error
    return results


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        # One that fails must not keep the others from being freed.
        with contextlib.suppress(Exception):
            function()


class Worker:
    """One thread on one device.

    Attributes:
        device: where it computes.
        tasks: what it has to compute, in order; None ends it.
        thread: computes.

    Raises:
        Exception: the thread can't compute on that device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tasks: SimpleQueue[Any] = SimpleQueue()
        # A new thread's limit is also remembered as that of all threads that have none yet: put the
        # caller's back.
        before = torch.get_num_threads()
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=(device, self.tasks, ready), name=f"lockstep {device}", daemon=True
        )
        self.thread.start()
        error = ready.get()
        torch.set_num_threads(before)
        if error is not None:
            raise error
        _workers.append(self)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Call a function after what the thread was given before, and don't wait."""
        pending: Future[T] = Future()

        def report(made: Report) -> None:
            _, result, error = made
            if error is None:
                pending.set_result(result)
            else:
                pending.set_exception(error)

        self.tasks.put((report, 0, function, Caller([self.device])))
        return pending


_workers: list[Worker] = []
"""All that were ever made."""

_idle: defaultdict[Device, list[Worker]] = defaultdict(list)
"""Threads that have been handed back. Taking one out is a single ``pop``, which needs no lock."""

if hasattr(os, "register_at_fork"):  # threads don't live on in a forked process
    os.register_at_fork(after_in_child=_workers.clear)
    os.register_at_fork(after_in_child=_idle.clear)


def borrowed(device: Device) -> Worker:
    """Take an idle thread of a device, or make one."""
    try:
        return _idle[device].pop()
    except IndexError:
        return Worker(device)


def hand_back(workers: Iterable[Worker]) -> None:
    """Keep threads for whoever borrows next."""
    for worker in workers:
        _idle[worker.device].append(worker)


@contextlib.contextmanager
def lent(devices: Sequence[Device]) -> Iterator[list[Worker]]:
    """Lend a thread for each device. Where an exception ends the context, the threads end, too,
    after what they compute.
    """
    workers = [borrowed(device) for device in devices]
    try:
        yield workers
    except BaseException:
        _end(workers, 0.0)
        raise
    hand_back(workers)


def _end(workers: Iterable[Worker], seconds: float) -> None:
    """Let threads end, after what they compute, and wait for them at most so long."""
    ending = list(workers)
    for worker in ending:
        worker.tasks.put(None)
    limit = time.monotonic() + seconds
    for worker in ending:
        worker.thread.join(max(0.0, limit - time.monotonic()))


@atexit.register
def _end_all() -> None:
    """Let idle threads end while Python still runs: one that wakes up later, in PyTorch's C++,
    may end the process.
    """
    _end(_workers, len(_workers))


def _work(
    device: Device, tasks: SimpleQueue[Any], ready: SimpleQueue[BaseException | None]
) -> None:
    """Settle on a device, in a thread of its own, and compute one task after another.

    Args:
        device: where it computes.
        tasks: tuples of a function that takes the report, the number in it, what to call and its
            caller's state.
        ready: gets None once the thread has settled, or why it can't.
    """
    try:
        cores.settle(device)
        cores.pin(device)
    except BaseException as failure:
        ready.put(failure)
        return
    ready.put(None)
    while (task := tasks.get()) is not None:
        report, number, function, caller = task
        made = number, *_attempt(function, device, caller)
        del function, caller, task  # an idle thread keeps nothing alive
        report(made)
        del report, made


def _attempt(
    function: Callable[[], Any], device: Device, caller: Caller
) -> tuple[Any, BaseException | None]:
    """Give the function's result, or what it raised."""
    try:
        return caller.run(function, device), None
    except BaseException as error:
        return None, error
