"""Local ranks: one call of a function on each, or one call after another on ranks that stay."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from lockstep.errors import FolderError, RunError
from lockstep.launch.devices import Device
from lockstep.launch.processes.call import Setup
from lockstep.launch.processes.modes import Modes
from lockstep.launch.processes.pickling import loads, pickled_call
from lockstep.launch.processes.rank import next_message
from lockstep.launch.processes.supervisor import Supervisor
from lockstep.launch.world import World, not_within_a_rank
from lockstep.run import stop_request
from lockstep.tensors.new_file import not_followed
from lockstep.tensors.seeding import kept_states

T = TypeVar("T")


def run(
    fn: Callable[..., T], devices: tuple[Device, ...], args: tuple[Any, ...], **settings: Any
) -> list[T]:
    """Call ``fn(world, *args)`` in local processes; see `lockstep.launch.launch`.

    Args:
        fn: the function.
        devices: of all ranks.
        args: the other arguments of ``fn``.
        settings: those of ``launch``.
    """
    with _started(pickled_call(fn, args), devices, **settings) as supervisor:
        with stop_request.reaching(supervisor.board):
            supervisor.watch()
        return [rank.result for rank in supervisor.ranks]


@contextlib.contextmanager
def _started(
    body: bytes,
    devices: tuple[Device, ...],
    *,
    folder: str | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    on_output: Callable[[str, str], None] | None = None,
    **settings: Any,
) -> Iterator[Supervisor]:
    """Start ranks, and give them to be watched; none of them runs afterwards."""
    with _meeting() as rendezvous:
        setup = Setup(devices, Modes.here(devices), rendezvous, folder=folder, **settings)
        with Supervisor(
            setup,
            body,
            log_of=lambda rank: _log(folder, rank) if rank else None,
            on_event=on_event,
            on_output=on_output,
        ) as ranks:
            yield ranks


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


@dataclass(frozen=True)
class _Returned:
    """What rank 0 sends when a call is over: its result."""

    result: Any


class StandingRanks:
    """Ranks that stay: they import and meet once, and each call goes to all of them. They start at
    the first one.

    A failure ends them all and comes out as that of a launch does; the next call starts others.

    Args:
        devices: of two ranks at least.
        devices_per_rank: neighbours.
    """

    def __init__(self, devices: tuple[Device, ...], devices_per_rank: int = 1) -> None:
        self.devices = devices
        self._devices_per_rank = devices_per_rank
        self._ranks: Supervisor | None = None
        self._stack = contextlib.ExitStack()
        self._returned: list[Any] = []

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(world, *args)`` on every rank and give rank 0's result. Events and output are
        not passed on.

        Each call finds the random generators where the first one did, in the modes that the caller
        started them in.

        Raises:
            Exception: as `lockstep.launch.launch`.
        """
        body = pickled_call(fn, args)
        ranks = self.start()
        for rank in ranks.ranks:
            ranks.send(rank.number, body)
        try:
            while not self._returned and ranks.failed_at is None:
                ranks.turn(None)
            if self._returned:
                return self._returned.pop()
            ranks.watch()
        except BaseException:
            self.close()
            raise
        self.close()
        raise RunError("the ranks ended before they gave a result: start again")

    def close(self) -> None:
        """Make sure that none of them runs."""
        self._ranks = None
        self._returned.clear()
        self._stack.close()

    def start(self) -> Supervisor:
        """Start them, unless they run: they get ready while the caller goes on.

        Raises:
            InputError: this process is a rank itself.
        """
        not_within_a_rank()
        if self._ranks is None:
            started = _started(
                pickled_call(_serve, ()),
                self.devices,
                on_event=self._hear,
                on_output=lambda text, stream: None,
                devices_per_rank=self._devices_per_rank,
            )
            self._ranks = self._stack.enter_context(started)
        return self._ranks

    def _hear(self, rank: int, event: Any) -> None:
        if isinstance(event, _Returned):
            self._returned.append(event.result)


def _serve(world: World) -> None:
    """Make one call after another, on each of them."""
    while True:
        fn, args = loads(next_message())
        emit = world.emit
        with kept_states():
            result = fn(world, *args)
        world.emit, world.folder, world.step = emit, None, 0
        world.barrier()  # all have done it
        if world.is_first:
            emit(_Returned(result))
        del fn, args, result
        gc.collect()  # models of one call are gone before the next
