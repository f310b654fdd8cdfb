"""One launch of local processes: lay out what the ranks need, start them, watch them, clean up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lockstep.errors import FolderError, RunError
from lockstep.launch import stopping
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, fork_server, rank_output
from lockstep.launch.processes.modes import Modes
from lockstep.launch.processes.supervisor import Rank, Supervisor

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
    with scratch_folder(folder) as scratch:
        ranks = started(
            fn,
            devices,
            args,
            scratch=scratch,
            backend=backend,
            folder=folder,
            on_event=on_event,
            on_output=on_output,
            timeout=timeout,
        )
        with ranks as supervisor:
            supervisor.watch()
        return [_result(rank) for rank in supervisor.ranks]


@contextlib.contextmanager
def started(
    fn: Callable[..., Any],
    devices: tuple[Device, ...],
    args: tuple[Any, ...],
    *,
    scratch: str,
    backend: str | None = None,
    folder: str | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    on_output: Callable[[str, str], None] | None = None,
    timeout: float = 1800.0,
) -> Iterator[Supervisor]:
    """Ranks that have been asked for, to be watched; none of them runs afterwards."""
    with contextlib.ExitStack() as stack:
        meeting = os.path.join(scratch, "rendezvous")
        setup = call.Setup(devices, meeting, backend, folder, timeout, Modes.here(devices))
        file = stack.enter_context(call.write(setup, fn, args))
        logs = os.path.join(folder or scratch, "ranks")
        ranks = [_rank(number, device, logs, stack) for number, device in enumerate(devices)]
        connection = stack.enter_context(fork_server.connect(scratch))
        board = call.Call(file.fileno()).board
        supervisor = Supervisor(connection, ranks, board, on_event, on_output or rank_output.to_own_streams)
        stack.callback(supervisor.close)
        if (request := stopping.current()) is not None:
            stack.enter_context(request.reaching(board))
        try:
            for rank in ranks:
                rank.start(connection, file.fileno())
            yield supervisor
        finally:
            supervisor.stop()


@contextlib.contextmanager
def scratch_folder(folder: str | None = None) -> Iterator[str]:
    """A folder of a launch's own, inside the run's where that can be named in a ``file://`` address."""
    inside = folder if folder is not None and not set("#?;") & set(folder) else None
    try:
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=".launch-", dir=inside)
    except OSError as error:
        raise FolderError(f"the folder of the run can't be written: {error}") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rank(number: int, device: Device, logs: str, stack: contextlib.ExitStack) -> Rank:
    channel = _pipe(stack)
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(channel[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    rank = Rank(number, device, channel)
    stack.callback(rank.close_theirs)
    if number == 0:
        rank.out, rank.err = _pipe(stack), _pipe(stack)
    else:
        rank.log = rank_output.Log(logs, number)
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
