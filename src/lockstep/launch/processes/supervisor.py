"""Watches the ranks of one launch: events and output come through, and when one fails, all stop.

::

    first failure ── 0.4 s at most, in which the others report theirs
                  ──> SIGKILL for the rest ──> raise the first

Everything is heard in one loop of the thread that launched: the end of each rank's life, each
rank's messages, and what rank 0 prints. The person's signal handlers are left alone; whatever they
raise ends the launch like any exception.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Self

from lockstep.errors import RankFailed, RunError
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, failure_records, fork_server
from lockstep.launch.processes.failure_records import Death, Record
from lockstep.launch.processes.fork_server import REPORT, Report
from lockstep.launch.processes.rank import EVENT, FAILURE, TEXT
from lockstep.run.terminal import to_own_streams

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
        channel: this end of the connection for messages.
        life: this end of the connection that lasts as long as the rank.
        log: the file of what it prints; None where it comes out here.
        log_start: the bytes of the log that earlier launches wrote.
        ended: how it ended, once it has.
        has_result, result: what its function returned, once it has.
        record: its own account of its failure.
    """

    number: int
    devices: Sequence[Device]
    channel: Connection
    life: socket.socket
    log: IO[bytes] | None = None
    log_start: int = 0
    ended: Report | None = None
    has_result: bool = False
    result: Any = None
    record: Record | None = None

    @property
    def heard(self) -> bool:
        """Whether it has reported a result or a failure, or is gone."""
        return self.record is not None or self.has_result or self.ended is not None

    def last_words(self) -> str:
        """Return the end of what was written to its log since this launch began."""
        if self.log is None:
            return ""
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(self.log_start, end - _LAST_WORDS))
        return self.log.read().decode("utf-8", "replace").strip()


class Supervisor:
    """The ranks of one launch, or the workers of a map: started, and in a ``with`` watched until
    none of them runs.

    Args:
        setup: the surroundings of the call.
        body: the function and its arguments, as ``pickling`` gives them.
        log_of: gives the file for what a rank prints, or None where it comes out here.
        blocks_of: gives the open files that a worker shares with the caller.
        on_event: called with (rank, event) for each event of a rank.
        on_output: called with (text, "stdout" or "stderr") for the lines that come out here.

    Attributes:
        failed_at: when the first failure was heard, or None.
    """

    def __init__(
        self,
        setup: call.Setup,
        body: bytes,
        *,
        log_of: Callable[[int], IO[bytes] | None] = lambda number: None,
        blocks_of: Callable[[int], Sequence[int]] = lambda number: (),
        on_event: Callable[[int, Any], None] | None = None,
        on_output: Callable[[str, str], None] | None = None,
    ) -> None:
        self.ranks: list[Rank] = []
        self.failed_at: float | None = None
        self._killed_at: float | None = None
        self._on_event = on_event
        self._on_output = on_output or to_own_streams
        self._lines: dict[IO[bytes], Lines] = {}
        self._hears: dict[Any, Callable[[], Any]] = {}  # by what has come, what takes it
        self._pid = os.getpid()
        with contextlib.ExitStack() as stack:
            self._stack = stack
            file = stack.enter_context(call.write(setup, body))
            self.board = stack.enter_context(call.Call(file.fileno()).board)
            try:
                for number, devices in enumerate(setup.groups):
                    self._start(number, devices, file.fileno(), log_of(number), blocks_of(number))
            finally:
                # It comes before all that the ranks write to is closed.
                stack.callback(self._stop)
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
        """Start a rank; the ends of the pipes that belong to it are closed here."""
        with contextlib.ExitStack() as theirs:
            ours, its = multiprocessing.Pipe()
            self._stack.enter_context(ours)
            theirs.enter_context(its)
            before = 0  # bytes of the log
            if log is None:
                out = self._relayed("stdout", theirs)
                err = self._relayed("stderr", theirs)
            else:
                before = self._stack.enter_context(log).seek(0, os.SEEK_END)
                out = err = log.fileno()
            life = fork_server.start_rank(number, [file, its.fileno(), out, err, *blocks])
        rank = Rank(number, devices, ours, self._stack.enter_context(life), log, before)
        self._hears[ours] = partial(self._hear, rank)
        self._hears[life] = partial(self._hear_end, rank)
        self.ranks.append(rank)

    def _relayed(self, stream: str, theirs: contextlib.ExitStack) -> int:
        """Return the writing end of a pipe, whose lines come out here."""
        reading, writing = os.pipe()
        theirs.callback(os.close, writing)
        pipe = self._stack.enter_context(open(reading, "rb", buffering=0))  # noqa: SIM115
        os.set_blocking(reading, False)
        self._lines[pipe] = Lines(lambda text: self._on_output(text, stream))
        self._hears[pipe] = partial(self._relay, pipe)
        return writing

    # ---- from outside ----------------------------------------------------------------------------

    def send(self, number: int, message: bytes) -> None:
        """Send to a worker. Whether it still lives shows in ``failures``."""
        with contextlib.suppress(OSError):
            self.ranks[number].channel.send_bytes(message)

    def watch(self) -> None:
        """Wait until all ranks have ended; raise where one has failed."""
        while any(rank.ended is None for rank in self.ranks):
            now = time.monotonic()
            if self.failed_at is None:
                self.turn(None)
                continue
            limit = self.failed_at + _PATIENCE
            if now >= limit or all(rank.heard for rank in self.ranks):
                limit = self._kill() + _KILLING
                if now >= limit:
                    break
            self.turn(limit - now)
        self._drain()
        failures = self.failures()
        if failures:
            self._raise(failures)

    def turn(self, seconds: float | None) -> None:
        """Hear what has come, and wait at most so long for it; None: until something comes.

        Raises:
            RunError: a rank could not be started, or the process that forks them has died.
        """
        for source in wait(list(self._hears), seconds):
            if source in self._hears:  # else another one has ended it meanwhile
                self._hears[source]()

    def failures(self) -> list[Record | Death]:
        """Return the failures of the ranks that have failed so far."""
        found: list[Record | Death] = []
        for rank in self.ranks:
            if rank.record is not None:
                found.append(rank.record)
            elif rank.ended is not None and not rank.has_result and not self._is_killed(rank.ended):
                step = self.board[rank.number]
                end = rank.ended
                found.append(Death(rank.number, end.time, step, end.code, rank.last_words()))
        return found

    def _is_killed(self, end: Report) -> bool:
        """Return whether a rank was killed here, for another's failure."""
        is_later = self._killed_at is not None and end.time >= self._killed_at
        return is_later and end.code == -signal.SIGKILL

    # ---- hearing ---------------------------------------------------------------------------------

    def _hear_end(self, rank: Rank) -> None:
        """Take note of how a rank has ended."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = rank.life.recv(REPORT.size)
        del self._hears[rank.life]
        if data:
            rank.ended = Report(*REPORT.unpack(data))
        elif self._killed_at is None:
            raise RankFailed(
                "the process that forks the ranks has died, and they with it: launch again"
            )
        else:
            rank.ended = Report(-signal.SIGKILL, 0, time.monotonic())
        if rank.ended.error:
            why = os.strerror(rank.ended.error)
            raise RunError(f"rank {rank.number} could not be started: {why}")
        while rank.channel.poll() and self._hear(rank):
            """All that it sent before it ended is there by now."""
        if not rank.has_result:
            self._note_failure()

    def _note_failure(self) -> None:
        if self.failed_at is None:
            self.failed_at = time.monotonic()

    def _hear(self, rank: Rank) -> bool:
        """Take a message of a rank; False where no more will come."""
        try:
            body = rank.channel.recv_bytes()
        except (EOFError, OSError):
            self._hears.pop(rank.channel, None)
            return False
        try:
            kind, value = pickle.loads(body)
        except Exception as error:
            raise RunError(
                f"what rank {rank.number} has sent can't be read here: {error}"
            ) from error
        if kind == FAILURE:
            rank.record = value
            self._note_failure()
        elif kind == TEXT:
            self._on_output(f"{value}\n", "stderr")
        elif kind != EVENT:
            rank.has_result = True
            rank.result = value
        elif self._on_event is not None:
            self._on_event(rank.number, value)
        return True

    def _relay(self, pipe: IO[bytes]) -> bool:
        """Pass on what was printed; False where there is no more just now."""
        data = pipe.read(1 << 16)
        if data:
            self._lines[pipe].feed(data)
        elif data is not None:  # the end, not only a pause
            self._hears.pop(pipe, None)
        return bool(data)

    def _drain(self) -> None:
        """Pass on what is left of the output, without waiting for who may still hold the pipe."""
        limit = time.monotonic() + 1.0
        for pipe, lines in self._lines.items():
            while time.monotonic() < limit and self._relay(pipe):
                """There may be more."""
            lines.end()

    # ---- ending ----------------------------------------------------------------------------------

    def _kill(self) -> float:
        """Let the forking process kill every rank that still runs; returns when it did so."""
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            for rank in self.ranks:
                with contextlib.suppress(OSError):
                    rank.life.shutdown(socket.SHUT_WR)
        return self._killed_at

    def _stop(self) -> None:
        """Make sure that no rank runs, whatever was raised, and wait until they are gone."""
        if os.getpid() != self._pid:  # a fork of the caller, whose ranks these aren't
            return
        limit = self._kill() + _KILLING
        for rank in self.ranks:
            rank.life.settimeout(max(0.01, limit - time.monotonic()))
            with contextlib.suppress(OSError):
                # The forking process closes the connection when the rank has gone.
                while rank.life.recv(REPORT.size):
                    """Its report."""

    def _raise(self, failures: list[Record | Death]) -> None:
        """Raise the failure that came first."""
        first = failure_records.guilty(failures)
        failed = {failure.rank for failure in failures}
        silent = []
        for rank in self.ranks:
            if not rank.has_result and rank.number not in failed:
                silent.append(rank.number)
        error = failure_records.to_raise(first, self.ranks[first.rank].devices, silent)
        raise error from error.__cause__
