"""What a rank does: join the others, call the function, send its result or the record of its failure, and end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

import cloudpickle

from lockstep.errors import InputError
from lockstep.launch import world as _world
from lockstep.launch.processes import frames, worker_context
from lockstep.launch.processes.call import Call
from lockstep.launch.processes.failure_records import Record
from lockstep.launch.processes.worker_context import Station


class RankWorld(_world.World):
    """A world whose step is also seen by the process that launched it, on the call's board."""

    _board: memoryview | None

    def __init__(self, *args: Any, board: memoryview | None = None, **fields: Any) -> None:
        object.__setattr__(self, "_board", board)
        super().__init__(*args, **fields)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "step":
            self.announce(value)

    def announce(self, step: int) -> None:
        """Keep it on the board."""
        if self._board is not None:
            self._board[self.rank] = step

    def asked_to_stop(self) -> bool:
        """Whether the process that launched this one has been asked to."""
        return super().asked_to_stop() if self._board is None else bool(self._board[self.size])

    def step_of(self, rank: int) -> int:
        """The step that a rank is in, or about to enter."""
        return super().step_of(rank) if self._board is None else self._board[rank]


def run(number: int, call_file: int, channel_file: int, more: Sequence[int] = ()) -> NoReturn:
    """Live as rank ``number``.

    Args:
        number: this rank's.
        call_file: the file of the call, open.
        channel_file: the pipe to the process that launched it, open.
        more: what a worker has beside, see `lockstep.launch.processes.worker_context`.
    """
    channel = frames.Writer(channel_file)
    call = Call(call_file)
    try:
        _own_streams()
        result = _call(number, call, channel, more)
    except BaseException as error:
        moment = time.monotonic()  # before anything else: the earliest is the one to blame
        record = Record.of(error, moment, number, call.board[number])
        channel.send(frames.FAILURE, pickle.dumps(record))
        if number > 0 and not more:  # kept in the rank's log; rank 0's would be shown twice
            _print(record.traceback)
        _flush()
        os._exit(1)
    channel.send(frames.RESULT, result)
    if more:  # a worker, which has nobody to take leave of; what is registered for the exit takes 0.1 s
        _flush()
        os._exit(0)
    _end()


def _call(number: int, call: Call, channel: frames.Writer, more: Sequence[int]) -> bytes:
    fn, args, setup = call.read()
    _reseed_numpy()
    size = len(setup.devices)

    def tell(event: Any) -> None:
        channel.send(frames.EVENT, _dumps(event))

    if setup.rendezvous is None:
        worker_context.work(fn, args, Station(number, setup.devices[number], call.board, tell, *more))
        return pickle.dumps(None)
    world = RankWorld(
        board=call.board,
        rank=number,
        size=size,
        devices=(setup.devices[number],),
        local_rank=number,
        local_size=size,
        folder=setup.folder,
        tell=tell,
    )
    _world.join(world, init_method=f"file://{setup.rendezvous}", backend=setup.backend, timeout=setup.timeout)
    with contextlib.nullcontext() if setup.modes is None else setup.modes.entered():
        returned = fn(world, *args)
    try:
        result = bytes(cloudpickle.dumps(returned))
    except Exception as error:
        raise TypeError(f"the result (a {type(returned).__qualname__}) can't be sent back: {error}") from error
    del returned
    if world.in_step:
        _end_together(world)
    _world.leave(world)
    return result


def _end_together(world: RankWorld) -> None:
    """Wait for the other ranks to end, unless one of them makes a step in which this one is missed."""
    try:
        world.meet("the end", waits=math.inf)
    except InputError:
        raise InputError(
            f"rank {world.rank} ended after step {world.step}, and another rank began one more: every rank has "
            "to make the same number of steps"
        ) from None


def _dumps(event: Any) -> bytes:
    try:
        return pickle.dumps(event)  # ten times as fast, and enough for numbers and names
    except Exception:
        return bytes(cloudpickle.dumps(event))


def _own_streams() -> None:
    """Let what is printed come out at once, line by line, and a crash in compiled code say where it was."""
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _lines_to(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines_to(2)  # type: ignore[misc]
    faulthandler.enable(sys.stderr)


def _lines_to(number: int) -> TextIOWrapper:
    return open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _reseed_numpy() -> None:
    """NumPy's generator is seeded when it is imported, which was before the fork: ranks would draw the same numbers.

    (Python's own is seeded anew by each fork; torch's begins with the same seed in every process.)
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _end() -> NoReturn:
    """End as a Python process ends, except for the destructors, some of which wait for ranks that are gone."""
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
