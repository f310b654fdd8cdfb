"""Local processes that take tasks: the caller's end. `lockstep.launch.processes.worker_context` is the workers'.

They are forked by the same process as ranks, watched in the same way, and as little outlives the caller. But they meet
in no process group: one that is slow keeps nobody waiting.

Nothing here waits for a worker that waits for the caller: a task's head is smaller than a pipe, and whoever sends tasks
has at most a few under way (see `lockstep.map`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

from lockstep.errors import RunError
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, fork_server, local_ranks, rank_output
from lockstep.launch.processes.failure_records import Death, Record
from lockstep.launch.processes.supervisor import Rank, Supervisor


class Workers:
    """A process per device, each of which calls ``fn(station, *args)``.

    Args:
        fn: of this package, or any that can be pickled by value.
        args: its further arguments.
        devices: one per worker.
        on_event: called with (worker, event) for what a worker tells, inside ``turn``.
        on_output: called with (text, "stdout" or "stderr") for the lines that workers print.
        blocks: files in memory that each worker shares with the caller.

    Attributes:
        blocks: for each worker its open files.

    Raises:
        InputError: the function or an argument can't be sent.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        devices: tuple[Device, ...],
        on_event: Callable[[int, Any], None],
        on_output: Callable[[str, str], None] | None = None,
        *,
        blocks: int = 0,
    ) -> None:
        self._pid = os.getpid()
        self.devices = devices
        with contextlib.ExitStack() as stack:
            setup = call.Setup(devices, None, None, None, 0.0)
            file = stack.enter_context(call.write(setup, fn, args))
            scratch = stack.enter_context(local_ranks.scratch_folder())
            self.blocks = [[_block(stack) for _ in range(blocks)] for _ in devices]
            tasks = [_tasks(stack) for _ in devices]
            self._tasks = [ends[1] for ends in tasks]
            ranks = [_rank(number, device, stack) for number, device in enumerate(devices)]
            connection = stack.enter_context(fork_server.connect(scratch))
            self._board = call.Call(file.fileno()).board
            self._supervisor = Supervisor(
                connection, ranks, self._board, on_event, on_output or rank_output.to_own_streams
            )
            stack.callback(self._supervisor.close)
            stack.callback(self._supervisor.stop)
            for rank, ends, shared in zip(ranks, tasks, self.blocks, strict=True):
                rank.start(connection, file.fileno(), [ends[0], *shared])
                os.close(ends[0])
                ends[0] = -1
            self._stack = stack.pop_all()

    def send(self, worker: int, head: bytes) -> None:
        """Give a worker a task. Whether it still lives shows in ``failure``."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._tasks[worker], len(head).to_bytes(4, "little") + head)

    def turn(self, seconds: float | None) -> None:
        """Hear what has come, and wait at most so long for it; None: until something comes.

        Raises:
            RunError: a worker could not be started, or the process that forks them has died.
        """
        self._supervisor.turn(seconds)
        if self._supervisor.lost:
            raise RunError("the process that forks the workers has died, and they with it: start again")

    @property
    def failure(self) -> Record | Death | None:
        """Of the first worker that has died, or couldn't begin; a death's step is the item it was at, from 1."""
        if self._supervisor.failed_at is None:
            return None
        return min(self._supervisor.failures(), key=lambda one: one.time, default=None)

    def end(self) -> None:
        """Tell the workers to end, and wait until they have."""
        for worker in range(len(self.devices)):
            self.send(worker, b"")
        self._supervisor.watch()

    def close(self) -> None:
        """Make sure that no worker runs. In a fork of the caller, only let go of what it has open too."""
        if os.getpid() == self._pid:
            self._stack.close()


def _rank(number: int, device: Device, stack: contextlib.ExitStack) -> Rank:
    rank = Rank(number, device, local_ranks._pipe(stack), local_ranks._pipe(stack), local_ranks._pipe(stack))
    stack.callback(rank.close_theirs)
    return rank


def _tasks(stack: contextlib.ExitStack) -> list[int]:
    """A pipe for tasks; its reading end is closed here, unless it is -1 by then."""
    ends = list(os.pipe())

    def close() -> None:
        for end in ends:
            if end >= 0:
                os.close(end)

    stack.callback(close)
    return ends


def _block(stack: contextlib.ExitStack) -> int:
    """A file without a name, in memory where the system can do that, of no size yet."""
    if hasattr(os, "memfd_create"):  # not bound by the size of /dev/shm, which is small in containers
        number = os.memfd_create("lockstep")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    stack.callback(os.close, number)
    return number
