"""What a rank does: join the others, call the function, send its result or the record of its
failure, and end.

A worker of a map is a rank without the others: in no process group, and it works on one task after
another until it is asked to end.
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lockstep.errors import InputError
from lockstep.launch import cores
from lockstep.launch import world as _world
from lockstep.launch.processes import call, group
from lockstep.launch.processes.failure_records import Failure
from lockstep.launch.processes.modes import entered
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

    def next(self) -> bytes:
        """Return what the other process sends next, as soon as there is something."""
        return self._connection.recv_bytes()


def run(number: int, channel_file: int, call_file: int, *blocks: int) -> NoReturn:
    """Live as rank ``number``, with these open files; one with ``blocks`` is a worker of a map."""
    channel = Channel(channel_file)
    whole, board = call.mapped(call_file)

    def fail(error: BaseException) -> NoReturn:
        """Tell of a failure, and end."""
        moment = time.monotonic()  # before anything else: the earliest is the one to blame
        failure = Failure.of(error, moment, number, board[number])
        if number > 0 and not blocks:  # kept in the rank's log; rank 0's would be shown twice
            with contextlib.suppress(Exception):
                sys.stderr.write(failure.traceback)
        _flush()  # before it is known: a rank that was heard may be killed
        channel.send(FAILURE, failure)
        os._exit(1)

    try:
        _own_streams()
        setup, fn, args = call.read(whole)
        # as Python does with its own at each fork; else all ranks would draw the same
        numpy.random.seed()
        devices = setup.groups[number]
        with entered(setup.modes):
            if blocks:
                _work(fn, args, World(devices=devices), channel, blocks)
            else:
                size = len(setup.groups)
                world = World(
                    rank=number,
                    size=size,
                    devices=devices,
                    local_rank=number,
                    local_size=size,
                    folder=setup.folder,
                    emit=lambda event: channel.send(EVENT, event),
                    print=lambda text: channel.send(TEXT, text),
                    fail=fail,
                )
                world._board = board
                _call(fn, args, setup, world, channel)
    except BaseException as error:
        fail(error)
    # A Python process ends so, but for destructors, which may wait for ranks that are gone.
    if not blocks:  # a worker has nobody to take leave of: what follows takes 0.1 s
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # which ends loader workers, among others
    _flush()
    os._exit(0)


def _call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    setup: call.Setup,
    world: World,
    channel: Channel,
) -> None:
    """Call the function as a rank, in a process group, and send its result."""
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.rank),
    }  # as libraries expect
    if len(set(setup.devices)) < len(setup.devices):
        world.backend = "gloo"  # NCCL wants a device for each rank
    group.join(world, FileStore(setup.rendezvous, world.size), setup.timeout)
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
    channel.write(body)


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


def _work(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world: World,
    channel: Channel,
    blocks: tuple[int, ...],
) -> None:
    """Call the function as a worker, on its device."""
    # It isn't pinned to the cores of its slot, as ranks are: it has no equals to be in step with,
    # and the caller, whose thread also computes, takes now the one core and now the other.
    cores.settle(world.device)
    _world.enter(world)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # it is alone, whatever its caller is
        os.environ.pop(name, None)
    fn(world, channel, blocks, *args)
    channel.send(RESULT, None)


def _own_streams() -> None:
    """Let what is printed come out at once, line by line, and a crash in compiled code say where
    it was.
    """
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = open(  # noqa: SIM115
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
