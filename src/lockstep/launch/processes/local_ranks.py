"""Local ranks: one call of a function on each."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from lockstep.errors import FolderError
from lockstep.launch.devices import Device
from lockstep.launch.processes.call import Setup
from lockstep.launch.processes.modes import modes_here
from lockstep.launch.processes.pickling import pickled
from lockstep.launch.processes.supervisor import Supervisor
from lockstep.run import stop_request
from lockstep.tensors.new_file import not_followed

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    devices: tuple[Device, ...],
    args: tuple[Any, ...],
    *,
    folder: str | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    on_output: Callable[[str, str], None] | None = None,
    **settings: Any,
) -> list[T]:
    """Call ``fn(world, *args)`` in local processes; see `lockstep.launch.launch`.

    Args:
        fn: the function.
        devices: of all ranks.
        args: the other arguments of ``fn``.
        folder, on_event, on_output, settings: those of ``launch``.
    """
    names = [f"args[{number}]" for number in range(len(args))]
    body = pickled({"the function": fn, **dict(zip(names, args, strict=True))})
    with _meeting() as rendezvous:
        setup = Setup(devices, modes_here(devices), rendezvous, folder=folder, **settings)
        with Supervisor(
            setup,
            body,
            log_of=lambda rank: _log(folder, rank) if rank else None,
            on_event=on_event,
            on_output=on_output,
        ) as supervisor:
            with stop_request.reaching(supervisor.board):
                supervisor.watch()
            return [result for rank in supervisor.ranks for result in rank.result or ()]


@contextlib.contextmanager
def _meeting() -> Iterator[str]:
    """Make a file where ranks meet; where the system can open one without a name, nothing can be
    left behind.
    """
    if sys.platform == "linux":
        with tempfile.TemporaryFile() as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield file.name


def _log(folder: str | None, rank: int) -> IO[bytes]:
    """Open the file for what a rank prints; a later launch with the same folder adds to it."""
    if folder is None:
        return tempfile.TemporaryFile()
    try:
        logs = os.path.join(folder, "ranks")
        os.makedirs(logs, exist_ok=True)
        return open(os.path.join(logs, f"{rank}.log"), "a+b", opener=not_followed)
    except OSError as error:
        raise FolderError(f"the folder of the run can't be written: {error}") from error
