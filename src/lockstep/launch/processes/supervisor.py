"""Watching the ranks of one launch: events and output come through, and when one fails, all stop.

::

    first failure ── at most 0.4 s, in which the others report theirs ──> SIGKILL for the rest ──> who was first? raise

Everything is heard in one loop of the thread that launched: the forking process's reports, each
rank's messages, and what rank 0 prints. The person's signal handlers are left alone; whatever they
raise ends the launch like any exception.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import IO, Any, Self

from lockstep.errors import RankFailed, RunError
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, failure_records, fork_server
from lockstep.launch.processes.failure_records import Death, Record
from lockstep.launch.processes.fork_server import REPORT, Report
from lockstep.launch.processes.rank import EVENT, FAILURE, SAID
from lockstep.launch.terminal import to_own_streams

_PATIENCE = 0.4
"""Seconds from the first failure in which the other ranks may report theirs."""

_KILLING = 10.0
"""Seconds after which a killed rank that hasn't gone (it hangs in a driver, say) is left behind."""

_LAST_WORDS = 4000
"""Bytes of a log that are shown as a dead rank's last words."""


class Lines:
    """Bytes in, whole lines of text out. A carriage return ends a line too: progress bars
    rewrite theirs.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take some bytes, and pass on the lines that they complete."""
        data = self._rest + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = data[cut:]
        if cut:
            self._write(data[:cut].decode("utf-8", "replace"))

    def end(self) -> None:
        """Pass on what is left."""
        if self._rest:
            self._write(self._rest.decode("utf-8", "replace"))


@dataclass(eq=False)
class Rank:
    """What is known of one rank.

    Attributes:
        number, devices: which it is.
        channel: this end of the way to it.
        log: the file of what it prints, and where that began; None where it comes out here.
        ended: how it ended, once it has.
        has_result, result: what its function returned, once it has.
        record: its own account of its failure.
    """

    number: int
    devices: Sequence[Device]
    channel: Connection
    log: tuple[IO[bytes], int] | None = None
    ended: Report | None = None
    has_result: bool = False
    result: Any = None
    record: Record | None = None

    @property
    def heard(self) -> bool:
        """Whether it has said how it went, or is gone."""
        return self.record is not None or self.has_result or self.ended is not None

    def last_words(self) -> str:
        """The end of what was written to its log since this launch began."""
        if self.log is None:
            return ""
        file, start = self.log
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LAST_WORDS))
        return file.read().decode("utf-8", "replace").strip()


class Supervisor:
    """The ranks of one launch, or the workers of a map: started, and in a ``with`` watched until
    none of them runs.

    Args:
        setup, fn, args: the call.
        log_of: gives the file for what a rank prints, or None where it comes out here.
        blocks_of: gives the open files that a worker shares with the caller.
        on_event: called with (rank, event) for what a rank tells.
        on_output: called with (text, "stdout" or "stderr") for the lines that come out here.

    Attributes:
        failed_at: when the first failure was heard, or None.

    Raises:
        InputError: the function or an argument can't be sent.
    """

    def __init__(
        self,
        setup: call.Setup,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        log_of: Callable[[int], IO[bytes] | None] = lambda number: None,
        blocks_of: Callable[[int], Sequence[int]] = lambda number: (),
        on_event: Callable[[int, Any], None] | None = None,
        on_output: Callable[[str, str], None] | None = None,
    ) -> None:
        self.ranks: list[Rank] = []
        self.failed_at: float | None = None
        self._killed_at: float | None = None
        self._is_gone = False
        self._on_event, self._on_output = on_event, on_output or to_own_streams
        self._streams: dict[IO[bytes], Lines] = {}
        self._pid = os.getpid()
        with contextlib.ExitStack() as stack:
            self._stack = stack
            file = stack.enter_context(call.write(setup, fn, args))
            self.board = stack.enter_context(call.Call(file.fileno()).board)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._connection = stack.enter_context(fork_server.connect())
            self._selector.register(self._connection, selectors.EVENT_READ, self._hear_server)
            try:
                for number, devices in enumerate(setup.groups):
                    self._start(number, devices, file.fileno(), log_of(number), blocks_of(number))
            finally:
                stack.callback(
                    self._stop
                )  # which comes before all that the ranks write to is closed
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._stack.close()

    def _start(
        self,
        number: int,
        devices: Sequence[Device],
        file: int,
        log: IO[bytes] | None,
        blocks: Sequence[int],
    ) -> None:
        """Ask for a rank's process; the ends of the pipes that belong there are let go here."""
        with contextlib.ExitStack() as theirs:
            ours, its = multiprocessing.Pipe()
            theirs.enter_context(its)
            rank = Rank(number, devices, self._stack.enter_context(ours))
            if log is not None:
                rank.log = self._stack.enter_context(log), log.seek(0, os.SEEK_END)
                out = err = log.fileno()
            else:
                out, err = (self._relayed(name, theirs) for name in ("stdout", "stderr"))
            fork_server.start_rank(
                self._connection, number, [file, its.fileno(), out, err, *blocks]
            )
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, rank))
        self.ranks.append(rank)

    def _relayed(self, stream: str, theirs: contextlib.ExitStack) -> int:
        """The writing end of a pipe, whose lines come out here."""
        reading, writing = os.pipe()
        theirs.callback(os.close, writing)
        pipe = self._stack.enter_context(open(reading, "rb", buffering=0))  # noqa: SIM115
        os.set_blocking(reading, False)
        self._streams[pipe] = Lines(lambda text: self._on_output(text, stream))
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._relay, pipe))
        return writing

    # ---- from outside ----------------------------------------------------------------------------

    def send(self, number: int, message: bytes) -> None:
        """Send to a rank, which takes it by ``next_message``. Whether it still lives shows in
        ``failures``.
        """
        with contextlib.suppress(OSError):
            self.ranks[number].channel.send_bytes(message)

    def watch(self) -> None:
        """Wait until all ranks have ended; raise where one has failed."""
        while not all(rank.ended is not None for rank in self.ranks) and not self._is_gone:
            left = None
            if self.failed_at is not None:
                left = self.failed_at + _PATIENCE - time.monotonic()
                if left <= 0 or all(rank.heard for rank in self.ranks):
                    self._kill()
            if (
                self._killed_at is not None
                and (left := self._killed_at + _KILLING - time.monotonic()) <= 0
            ):
                break
            self.turn(left)
        self._drain()
        if failures := self.failures():
            first = failure_records.guilty(failures)
            failed = {failure.rank for failure in failures}
            silent = [
                rank.number
                for rank in self.ranks
                if not rank.has_result and rank.number not in failed
            ]
            error = failure_records.to_raise(first, self.ranks[first.rank].devices, silent)
            raise error from error.__cause__

    def turn(self, seconds: float | None) -> None:
        """Hear what has come, and wait at most so long for it; None: until something comes.

        Raises:
            RunError: a rank could not be started, or the process that forks them has died.
        """
        for key, _ in self._selector.select(seconds):
            key.data()

    def failures(self) -> list[Record | Death]:
        """Of the ranks that have failed so far."""
        return [failure for rank in self.ranks if (failure := self._failure(rank)) is not None]

    # ---- hearing ---------------------------------------------------------------------------------

    def _hear_server(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._connection.recv(REPORT.size)
        if not data:
            self._selector.unregister(self._connection)
            self._is_gone = True
            if self._killed_at is None:
                raise RankFailed(
                    "the process that forks the ranks has died, and they with it: launch again"
                )
            return
        report = Report(*REPORT.unpack(data))
        rank = self.ranks[report.rank]
        rank.ended = report
        if report.error:
            raise RunError(f"rank {rank.number} could not be started: {os.strerror(report.error)}")
        while rank.channel.poll() and self._hear(rank):
            """All that it sent before it ended is there by now."""
        if not rank.has_result:
            self.failed_at = self.failed_at or time.monotonic()

    def _hear(self, rank: Rank) -> bool:
        """Take a message of a rank; False where no more will come."""
        try:
            body = rank.channel.recv_bytes()
        except (EOFError, OSError):
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.channel)
            return False
        try:
            kind, value = pickle.loads(body)
        except Exception as error:
            raise RunError(
                f"what rank {rank.number} has sent can't be read here: {error}"
            ) from error
        if kind == FAILURE:
            rank.record = value
            self.failed_at = self.failed_at or time.monotonic()
        elif kind == SAID:
            self._on_output(f"{value}\n", "stderr")
        elif kind != EVENT:
            rank.has_result, rank.result = True, value
        elif self._on_event is not None:
            self._on_event(rank.number, value)
        return True

    def _relay(self, pipe: IO[bytes]) -> bool:
        """Pass on what was printed; False where there is no more just now."""
        data = pipe.read(1 << 16)
        if data:
            self._streams[pipe].feed(data)
        elif data is not None:  # the end
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
        return bool(data)

    def _drain(self) -> None:
        """Pass on what is left of the output, without waiting for who may still hold the pipe."""
        limit = time.monotonic() + 1.0
        for pipe, lines in self._streams.items():
            while time.monotonic() < limit and self._relay(pipe):
                """There may be more."""
            lines.end()

    # ---- ending ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        """Let the forking process kill every rank that still runs."""
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def _stop(self) -> None:
        """Make sure that no rank runs, whatever was raised, and wait until they are gone."""
        if os.getpid() != self._pid:  # a fork of the caller, whose ranks these aren't
            return
        self._kill()
        self._connection.settimeout(_KILLING)
        with contextlib.suppress(OSError):
            # The forking process closes the connection when the last rank has gone.
            while self._connection.recv(REPORT.size):
                """The report of one that was killed."""

    def _failure(self, rank: Rank) -> Record | Death | None:
        if rank.record is not None:
            return rank.record
        ended = rank.ended
        if rank.has_result or ended is None:
            return None
        if (
            self._killed_at is not None
            and ended.code == -signal.SIGKILL
            and ended.time >= self._killed_at
        ):
            return None  # it was killed for another's failure
        return Death(
            rank.number, ended.time, self.board[rank.number], ended.code, rank.last_words()
        )
