"""One launch of local processes: lay out what the ranks need, start them, watch them, clean up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.devices import Device
from lockstep.errors import FolderError, RunError
from lockstep.launch import call, output, server
from lockstep.launch.modes import Modes
from lockstep.launch.supervise import Rank, Supervisor

T = TypeVar("T")

_PIPE_BYTES = 1 << 20
"""Room in a rank's pipe, so that large results come in fewer pieces and events seldom wait."""


def run(
    fn: Callable[..., T],
    devices: tuple[Device, ...],
    args: tuple[Any, ...],
    *,
    backend: str | None,
    folder: str | None,
    on_event: Callable[[int, Any], None] | None,
    on_output: Callable[[str, str], None] | None,
    timeout: float,
) -> list[T]:
    """Call ``fn(world, *args)`` in one local process per device; see `lockstep.launch.launch`."""
    with contextlib.ExitStack() as stack:
        scratch = _scratch(folder)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        meeting = os.path.join(scratch, "rendezvous")
        setup = call.Setup(devices, meeting, backend, folder, timeout, Modes.here(devices))
        file = stack.enter_context(call.write(setup, fn, args))
        logs = os.path.join(folder or scratch, "ranks")
        ranks = [_rank(number, device, logs, stack) for number, device in enumerate(devices)]
        connection = stack.enter_context(server.connect(scratch))
        supervisor = Supervisor(
            connection, ranks, call.Call(file.fileno()).board, on_event, on_output or output.to_own_streams
        )
        stack.callback(supervisor.close)
        try:
            for rank in ranks:
                rank.start(connection, file.fileno())
            supervisor.watch()
        finally:
            supervisor.stop()
        return [_result(rank) for rank in ranks]


def _scratch(folder: str | None) -> str:
    """A folder of this launch's own, inside the run's where that can be named in a ``file://`` address."""
    inside = folder if folder is not None and not set("#?;") & set(folder) else None
    try:
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        return tempfile.mkdtemp(prefix=".launch-", dir=inside)
    except OSError as error:
        raise FolderError(f"the folder of the run can't be written: {error}") from error


def _rank(number: int, device: Device, logs: str, stack: contextlib.ExitStack) -> Rank:
    channel = _pipe(stack)
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(channel[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    rank = Rank(number, device, channel)
    stack.callback(rank.close_theirs)
    if number == 0:
        rank.out, rank.err = _pipe(stack), _pipe(stack)
    else:
        rank.log = output.Log(logs, number)
        stack.callback(rank.log.file.close)
    return rank


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    stack.callback(os.close, ends[0])
    return ends


def _result(rank: Rank) -> Any:
    assert rank.result is not None
    try:
        return pickle.loads(rank.result)
    except Exception as error:
        raise RunError(f"the result of rank {rank.number} can't be read here: {error}") from error
    finally:
        rank.result = None
