"""Ranks that stay: one call after another on the same processes, which import and meet once.

::

    caller    the call into a file, a byte into a pipe ──> ... hears the ranks, as in any launch ──> the result
    rank 0    reads the byte ──> all ranks read the file, and call ──> tells its result ──> waits for the next byte

A failure ends them all and comes out as that of a launch does; the next call starts others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from lockstep.errors import RunError
from lockstep.launch import not_within_a_rank
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, local_ranks
from lockstep.launch.processes.supervisor import Supervisor
from lockstep.launch.world import World
from lockstep.tensors.seeding import kept_states


@dataclass(frozen=True)
class _Returned:
    """What rank 0 tells when a call is over: its result, pickled."""

    result: bytes


class StandingRanks:
    """A process per device, started by ``start`` or at the first call.

    Args:
        devices: one per rank, two at least.
    """

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self.devices = devices
        self._supervisor: Supervisor | None = None
        self._returned: list[bytes] = []

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(world, *args)`` on every rank and give rank 0's result. Events and output are not passed on.

        Each call finds the random generators where the first one did, in the modes that the caller started them in.

        Raises:
            Exception: as `lockstep.launch.launch`.
        """
        body = call.pickled(fn, args)
        self.start()
        supervisor = self._supervisor
        assert supervisor is not None
        with open(self._file, "wb") as file:
            file.write(body)
        os.write(self._bell, b"\n")
        while not self._returned and supervisor.failed_at is None and not supervisor.lost:
            supervisor.turn(None)
        if self._returned:
            return pickle.loads(self._returned.pop())
        try:
            supervisor.watch()
        finally:
            self.close()
        raise RunError("the ranks ended before they gave a result: start again")

    def close(self) -> None:
        """Make sure that none of them runs."""
        if self._supervisor is not None:
            self._supervisor = None
            self._returned.clear()
            self._stack.close()

    def start(self) -> None:
        """Start them, unless they run: they get ready while the caller goes on.

        Raises:
            InputError: this process is a rank itself.
        """
        not_within_a_rank()
        if self._supervisor is not None:
            return
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(local_ranks.scratch_folder())
            self._file = os.path.join(scratch, "call")
            calls = os.path.join(scratch, "calls")
            os.mkfifo(calls)
            # For reading too, so that it opens at once; when it closes here, rank 0 reads the end.
            self._bell = os.open(calls, os.O_RDWR)
            stack.callback(os.close, self._bell)
            self._supervisor = stack.enter_context(
                local_ranks.started(
                    _serve,
                    self.devices,
                    (calls, self._file),
                    scratch=scratch,
                    on_event=self._hear,
                    on_output=lambda text, stream: None,
                )
            )
            self._stack = stack.pop_all()

    def _hear(self, rank: int, event: Any) -> None:
        if isinstance(event, _Returned):
            self._returned.append(event.result)


def _serve(world: World, calls: str, path: str) -> None:
    """What each of them does: call after call, as rank 0 hears of them."""
    with open(calls, "rb", buffering=0) if world.is_first else contextlib.nullcontext() as bell:
        while world.broadcast_object(bool(bell and bell.read(1))):
            with open(path, "rb") as file:
                fn, args = pickle.load(file)
            tell = world.tell
            with kept_states():
                result = fn(world, *args)
            world.tell, world.folder, world.step = tell, None, 0
            world.barrier()  # all have read the call: its file may be written anew
            if world.is_first:
                tell(_Returned(cloudpickle.dumps(result)))
            del fn, args, result
            gc.collect()  # models of one call are gone before the next
