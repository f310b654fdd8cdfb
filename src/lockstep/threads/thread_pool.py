"""A pool of threads that stay, one per device, and compute at the same time.

A thread made for each call costs more than a small step, and forgets its thread limit: OpenMP's
belongs to the thread that sets it, so a thread here sets its own once, is kept on the cores of its
slot, and waits for the next call.

::

    run([f, g])     caller     ──put f, put g──────wait────────────────────▶ [f(), g()]
                    cpu:0      ······▶ f() ──────────┐ the last one
                    cpu:1      ········▶ g() ────────┘ wakes the caller
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lockstep.errors import InputError
from lockstep.launch import cores
from lockstep.launch.devices import Device
from lockstep.threads.thread_context import Caller

T = TypeVar("T")

_PATIENCE = 5.0
"""Seconds that an interrupted caller waits for the threads to come to the end of what they
compute.
"""


class ThreadPool:
    """One thread for each device, for as long as the pool lives.

    Args:
        devices: where each computes. One device may occur several times, and has a thread each
            time.
        role: what the threads are for, in the notes of errors: ``replica 1 on cpu:1``; "" adds no
            note.

    Attributes:
        devices: as given.
        on_abort: called, once per failing run, as soon as one thread has raised or the caller was
            interrupted: they must free threads that wait for the failed one (``exchange.abort``,
                ``barrier.abort``).
    """

    def __init__(self, devices: Sequence[Device], role: str = "replica") -> None:
        self.devices = tuple(devices)
        self.role = role
        self.on_abort: list[Callable[[], None]] = []
        self._workers = [_Worker(device) for device in self.devices]

    def run(self, callables: Sequence[Callable[[], T] | None]) -> list[T | None]:
        """Call each function in the thread of its device, all at the same time, and wait for all.

        They see the caller's grad mode, autocast, default device and context variables.

        Args:
            callables: one for each device; None lets that device sit out.

        Returns:
            What each returned, in the order of the devices; None for those that sat out.

        Raises:
            InputError: not as many functions as devices.
            Exception: the first that was raised, with its own type and traceback and a note that
                names the device.
        """
        if len(callables) != len(self.devices):
            raise InputError(
                f"{len(callables)} functions for {len(self.devices)} devices: give one for each, "
                "or None"
            )
        for number, worker in enumerate(self._workers):
            if not worker.is_alive:
                self._workers[number] = _Worker(worker.device)
        busy = [number for number, function in enumerate(callables) if function is not None]
        if not busy:
            return [None] * len(callables)
        call = _Call(len(callables), len(busy), self.on_abort)
        caller = Caller(self.devices)
        for number in busy:
            self._workers[number].tasks.put((call, number, callables[number], caller))
        call.wait()
        if call.error is not None:
            self._raise(call)
        return call.results

    def start(self, number: int, function: Callable[[], T]) -> Future[T]:
        """Call one function in the thread of device ``number``, after what it was given before,
        and don't wait.
        """
        pending: _Started[T] = _Started()
        if not self._workers[number].is_alive:
            self._workers[number] = _Worker(self.devices[number])
        self._workers[number].tasks.put((pending, number, function, Caller(self.devices)))
        return pending

    def close(self) -> None:
        """Let the threads go, each after what it is computing. A later ``run`` makes new ones."""
        for worker in self._workers:
            worker.close()

    def _raise(self, call: _Call) -> None:
        """Raise the error of a call, with a note that names the device.

        Nothing keeps the error afterwards: its traceback holds the frames of what was computed.
        """
        error = call.error
        call.error = None
        assert error is not None
        if self.role:
            error.add_note(f"raised by {self.role} {call.culprit} on {self.devices[call.culprit]}")
        try:
            raise error
        finally:
            del error  # else its traceback holds this frame, which holds the error


class _Started(Future[T]):
    """A function that was started."""

    def report(self, number: int, result: T, error: BaseException | None) -> None:
        """Take what the thread reports at the end."""
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)


class _Call:
    """One ``run``: how many are still computing, what they gave, and the first error.

    Args:
        count: of the devices of the pool.
        left: how many of them compute.
        on_abort: called as soon as one has failed.

    Attributes:
        results: by device.
        error: the first that was raised.
        culprit: the number of the device that raised it.
    """

    def __init__(self, count: int, left: int, on_abort: Sequence[Callable[[], None]]) -> None:
        self.results: list[Any] = [None] * count
        self.error: BaseException | None = None
        self.culprit = 0
        self._left = left
        self._on_abort = on_abort
        self._lock = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()

    def report(self, number: int, result: Any, error: BaseException | None) -> None:
        """Take what a thread reports as it ends; the first failure frees those that wait for it."""
        self.results[number] = result
        with self._lock:
            is_first = error is not None and self.error is None
            if is_first:
                self.error = error
                self.culprit = number
        try:
            if is_first:
                self._abort()
        finally:
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._finished.release()

    def wait(self) -> None:
        """Wait until all threads have reported.

        Raises:
            BaseException: what interrupts the wait, Ctrl-C say.
        """
        try:
            self._finished.acquire()
        except BaseException:
            # Ctrl-C: the threads can't be stopped, but those that wait are freed, and soon all idle.
            self._abort()
            self._finished.acquire(timeout=_PATIENCE)
            raise

    def _abort(self) -> None:
        """Free threads that wait for one that has failed."""
        for hook in tuple(self._on_abort):
            # One that fails must not keep the others from being freed.
            with contextlib.suppress(Exception):
                hook()


class _Worker:
    """One thread on one device.

    Attributes:
        device: where it computes.
        tasks: what it has to compute, in order; None ends it.
        ident: of the thread.

    Raises:
        Exception: the thread can't compute on that device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tasks: SimpleQueue[Any] = SimpleQueue()
        self._process = os.getpid()
        self._closed = False
        # A new thread's limit is also remembered as that of all threads that have none yet: put the
        # caller's back.
        before = torch.get_num_threads()
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(device, self.tasks, ready), name=f"lockstep {device}", daemon=True
        )
        thread.start()
        error = ready.get()
        torch.set_num_threads(before)
        if error is not None:
            raise error
        self.ident = thread.ident
        _threads[thread] = self.tasks
        self._finalizer = weakref.finalize(self, self.tasks.put, None)

    @property
    def is_alive(self) -> bool:
        """Whether it can work still: threads don't live on in a forked process."""
        return not self._closed and self._process == os.getpid()

    def close(self) -> None:
        """Let the thread end, after what it is computing."""
        self._closed = True
        self._finalizer()


_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Any]] = (
    weakref.WeakKeyDictionary()
)
"""All threads of all pools, and what wakes them."""


@atexit.register
def _end_all() -> None:
    """Let idle threads end while Python still runs: one that wakes up later, in PyTorch's C++,
    may end the process.
    """
    threads = list(_threads.items())
    for _, tasks in threads:
        tasks.put(None)
    for thread, _ in threads:
        thread.join(timeout=1.0)


def _work(
    device: Device, tasks: SimpleQueue[Any], ready: SimpleQueue[BaseException | None]
) -> None:
    """Settle on a device, in a thread of its own, and compute one task after another.

    Args:
        device: where it computes.
        tasks: tuples of a call, the device's number in it, a function and its caller's state.
        ready: gets None once the thread has settled, or why it can't.
    """
    try:
        # A thread's first question sets its limit to the process's, over one set before.
        torch.get_num_threads()
        cores.settle(device)
        cores.pin(device)
    except BaseException as failure:
        ready.put(failure)
        return
    ready.put(None)
    while (task := tasks.get()) is not None:
        call, number, function, caller = task
        result, error = _attempt(function, device, caller)
        del function, caller, task  # an idle thread keeps nothing alive
        call.report(number, result, error)
        del call, result, error


def _attempt(
    function: Callable[[], Any], device: Device, caller: Caller
) -> tuple[Any, BaseException | None]:
    """Give the function's result, or what it raised."""
    try:
        return caller.run(function, device), None
    except BaseException as error:
        return None, error


_idle: dict[Device, list[_Worker]] = {}
"""Threads that ``borrowed`` pools have handed back. Taking one out is a single ``pop``, which
needs no lock.
"""


@contextlib.contextmanager
def borrowed(devices: Sequence[Device], role: str = "replica") -> Iterator[ThreadPool]:
    """Lend a pool of threads that are idle now, or new ones; they are handed back at the end.

    Calls inside calls, and from several threads, get threads of their own: they never wait for one
    another.
    """
    pool = ThreadPool((), role)
    pool.devices = tuple(devices)
    pool._workers = [_idle_worker(device) for device in pool.devices]
    try:
        yield pool
    except Exception:
        _hand_back(pool)
        raise
    # After Ctrl-C they may still compute: then they end instead, with their pool.
    _hand_back(pool)


def _idle_worker(device: Device) -> _Worker:
    """Take an idle thread of a device, or make one; those of a parent process are dropped."""
    waiting = _idle.setdefault(device, [])
    while True:
        try:
            worker = waiting.pop()
        except IndexError:
            return _Worker(device)
        if worker.is_alive:
            return worker


def _hand_back(pool: ThreadPool) -> None:
    """Keep the threads of a pool for the next one that is borrowed."""
    for worker in pool._workers:
        _idle.setdefault(worker.device, []).append(worker)
