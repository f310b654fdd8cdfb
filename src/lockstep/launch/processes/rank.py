"""What a rank does: join the others, call the function, send its result or the record of its
failure, and end.

A worker of a map is a rank without the others: in no process group, and it works on one task after
another until it is asked to end. What it needs for that is its `WorkerContext`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lockstep.errors import InputError
from lockstep.launch import cores
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.processes import group
from lockstep.launch.processes.call import Call, Setup
from lockstep.launch.processes.failure_records import Record
from lockstep.launch.processes.modes import Modes
from lockstep.launch.processes.pickling import dumps
from lockstep.launch.world import World

EVENT, TEXT, RESULT, FAILURE = "event", "text", "result", "failure"
"""Kinds of messages to the process that launched this one; each comes with a value."""


class Channel:
    """The way to the process that launched this one. Threads may share it; a fork of the rank
    stays silent.
    """

    def __init__(self, number: int) -> None:
        self._connection = Connection(number)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, kind: str, value: Any) -> None:
        """Send a message of some kind."""
        self.write(dumps((kind, value)))

    def write(self, body: bytes) -> None:
        """Send a message that is pickled already, waiting for the reader where there is no room."""
        if os.getpid() == self._pid:
            with self._lock:
                self._connection.send_bytes(body)

    def emit(self, event: Any) -> None:
        """Send an event."""
        self.send(EVENT, event)

    def next(self) -> bytes:
        """Return what the other process sends next, as soon as there is something."""
        return self._connection.recv_bytes()


_channel: Channel
"""This process's."""


@dataclass(eq=False)
class WorkerContext:
    """What a worker has to do with: its number and device, and the caller's modes.

    Attributes:
        blocks: files that the caller has open too.
        channel: the way to the caller. Only heads go there, a few kilobytes at most; what is large
            goes in blocks.
    """

    number: int
    device: Device
    modes: Modes
    blocks: Sequence[int]
    channel: Channel


_worker: WorkerContext | None = None


def current_worker() -> WorkerContext | None:
    """Return the context of this process, where it is a worker."""
    return _worker


def run(number: int, call_file: int, channel_file: int, blocks: Sequence[int]) -> NoReturn:
    """Live as rank ``number``, with these open files; one with ``blocks`` is a worker of a map."""
    global _channel
    _channel = Channel(channel_file)
    call = Call(call_file)
    is_worker = bool(blocks)
    try:
        _own_streams()
        fn, args, setup = call.read()
        # as Python does with its own at each fork; else all ranks would draw the same
        numpy.random.seed()
        if is_worker:
            device = setup.devices[number]
            _work(fn, args, WorkerContext(number, device, setup.modes, blocks, _channel))
            _channel.send(RESULT, None)
        else:
            _call(fn, args, setup, number, call.board)
    except BaseException as error:
        _fail(error, number, call.board)
    if is_worker:  # it has nobody to take leave of; what is registered for the exit takes 0.1 s
        _flush()
        os._exit(0)
    _end()


def _call(
    fn: Callable[..., Any], args: tuple[Any, ...], setup: Setup, number: int, board: memoryview
) -> None:
    """Call the function as a rank, in a process group, and send its result."""
    size = len(setup.groups)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
    }  # as libraries expect
    world = World(
        rank=number,
        size=size,
        devices=setup.groups[number],
        local_rank=number,
        local_size=size,
        folder=setup.folder,
        emit=_channel.emit,
        print=lambda text: _channel.send(TEXT, text),
        fail=lambda error: _fail(error, number, board),
    )
    world._board = board
    assert setup.rendezvous is not None
    if len(set(setup.devices)) < len(setup.devices):
        world.backend = "gloo"  # NCCL wants a device for each rank
    store = FileStore(setup.rendezvous, size)
    group.join(world, store, setup.timeout)
    with setup.modes.entered():
        result = fn(world, *args)
    try:
        body = dumps((RESULT, result))
    except Exception as error:
        raise TypeError(
            f"the result (a {type(result).__qualname__}) can't be sent back: {error}"
        ) from error
    del result
    if world.in_step:
        _end_together(world)
    group.leave(world)
    _channel.write(body)


def _fail(error: BaseException, number: int, board: memoryview) -> NoReturn:
    """Tell of a failure, and end."""
    moment = time.monotonic()  # before anything else: the earliest is the one to blame
    record = Record.of(error, moment, number, board[number])
    if (
        number > 0 and current_worker() is None
    ):  # kept in the rank's log; rank 0's would be shown twice
        _print(record.traceback)
    _flush()  # before it is known: a rank that was heard may be killed
    _channel.send(FAILURE, record)
    os._exit(1)


def _end_together(world: World) -> None:
    """Wait for the other ranks to end, unless one of them makes a step in which this one is
    missed.
    """
    try:
        world.meet("the end", waits=math.inf)
    except InputError:
        raise InputError(
            f"rank {world.rank} ended after step {world.step}, but another rank began one more: "
            "every rank must make the same number of steps"
        ) from None


def _work(fn: Callable[..., Any], args: tuple[Any, ...], context: WorkerContext) -> None:
    """Call the function as a worker, on its device."""
    global _worker
    # It isn't pinned to the cores of its slot, as ranks are: it has no equals to be in step with,
    # and the caller, whose thread also computes, takes now the one core and now the other.
    cores.settle(context.device)
    _world.enter(World(devices=(context.device,)))
    _worker = context
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # it is alone, whatever its caller is
        os.environ.pop(name, None)
    fn(context, *args)


def _own_streams() -> None:
    """Let what is printed come out at once, line by line, and a crash in compiled code say where
    it was.
    """
    sys.stdout = sys.__stdout__ = _lines_to(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines_to(2)  # type: ignore[misc]
    faulthandler.enable(sys.stderr)


def _lines_to(number: int) -> TextIOWrapper:
    return open(
        number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _end() -> NoReturn:
    """End as a Python process ends, but without destructors, which may wait for ranks that are gone."""
    code = 0
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # which ends loader workers, among others
    except BaseException as error:
        _print(f"at exit: {error!r}\n")
        code = 1
    _flush()
    os._exit(code)


def _print(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
