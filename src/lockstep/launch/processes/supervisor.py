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

from lockstep.errors import RankFailed
from lockstep.launch.devices import Device
from lockstep.launch.processes import call, failure_records, fork_server
from lockstep.launch.processes.failure_records import Failure
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
        has_ended: whether its process is gone.
        result: what its function returned, in a list; None until it has.
        failure: how it has failed.
    """

    number: int
    devices: Sequence[Device]
    channel: Connection
    life: socket.socket
    log: IO[bytes] | None = None
    log_start: int = 0
    has_ended: bool = False
    result: list[Any] | None = None
    failure: Failure | None = None

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
            _, board = call.mapped(file.fileno())
            self.board = stack.enter_context(board)
            try:
                for number, devices in enumerate(setup.groups):
                    files = [file.fileno(), *blocks_of(number)]
                    self._start(number, devices, log_of(number), files)
            finally:
                # It comes before all that the ranks write to is closed.
                stack.callback(self._stop)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._stack.close()

    def _start(
        self, number: int, devices: Sequence[Device], log: IO[bytes] | None, files: list[int]
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
            life = fork_server.start_rank(number, [out, err, its.fileno(), *files])
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
        while not all(rank.has_ended for rank in self.ranks):
            seconds = None
            if self.failed_at is not None:
                seconds = self.failed_at + _PATIENCE - time.monotonic()
                if seconds <= 0 or not self._silent():
                    seconds = self._kill() + _KILLING - time.monotonic()
                    if seconds <= 0:
                        break
            self.turn(seconds)
        limit = time.monotonic() + 1.0  # a child of the rank may write on, or hold the pipe
        for pipe, lines in self._lines.items():
            while time.monotonic() < limit and self._relay(pipe):
                """There may be more."""
            lines.end()
        failures = self.failures()
        if failures:
            first = failure_records.guilty(failures)
            devices = self.ranks[first.rank].devices
            raise failure_records.to_raise(first, devices, self._silent())

    def turn(self, seconds: float | None) -> None:
        """Hear what has come, and wait at most so long for it; None: until something comes.

        Raises:
            RankFailed: the process that forks the ranks has died.
        """
        for source in wait(list(self._hears), seconds):
            if source in self._hears:  # else another one has ended it meanwhile
                self._hears[source]()

    def failures(self) -> list[Failure]:
        """Return the failures of the ranks that have failed so far."""
        return [rank.failure for rank in self.ranks if rank.failure is not None]

    def _silent(self) -> list[int]:
        """Return the ranks that have reported neither a result nor a failure."""
        ranks = [rank for rank in self.ranks if rank.result is None and rank.failure is None]
        return [rank.number for rank in ranks]

    # ---- hearing ---------------------------------------------------------------------------------

    def _hear_end(self, rank: Rank) -> None:
        """Take note of how a rank has ended."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = rank.life.recv(fork_server.REPORT.size)
        del self._hears[rank.life]
        if not data and self._killed_at is None:
            raise RankFailed(
                "the process that forks the ranks has died, and they with it: launch again"
            )
        rank.has_ended = True
        while rank.channel.poll() and self._hear(rank):
            """All that it sent before it ended is there by now."""
        if rank.result is None and rank.failure is None and data:
            code, moment = fork_server.REPORT.unpack(data)
            if self._killed_at is None or moment < self._killed_at or code != -signal.SIGKILL:
                step = self.board[rank.number]
                words = rank.last_words()
                self._note(rank, Failure.of_end(code, moment, rank.number, step, words))

    def _note(self, rank: Rank, failure: Failure) -> None:
        """Note that a rank has failed."""
        rank.failure = failure
        if self.failed_at is None:
            self.failed_at = time.monotonic()

    def _hear(self, rank: Rank) -> bool:
        """Take a message of a rank; False where no more will come."""
        try:
            body = rank.channel.recv_bytes()
        except (EOFError, OSError):
            self._hears.pop(rank.channel, None)
            return False
        kind, value = pickle.loads(body)
        if kind == FAILURE:
            self._note(rank, value)
        elif kind == TEXT:
            self._on_output(f"{value}\n", "stderr")
        elif kind != EVENT:
            rank.result = [value]
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
            if not rank.has_ended:
                rank.life.settimeout(max(0.01, limit - time.monotonic()))
                with contextlib.suppress(OSError):
                    rank.life.recv(fork_server.REPORT.size)
