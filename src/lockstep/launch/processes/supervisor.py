"""Watching the ranks of one launch: events and output come through, and when one fails, all stop.

::

    first failure ── at most 0.4 s, in which the others report theirs ──> SIGKILL for the rest ──> who was first? raise

Everything is heard in one loop of the thread that launched: the forking process's reports, each rank's frames, and what
rank 0 prints. The person's signal handlers are left alone; whatever they raise ends the launch like any exception.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.errors import RunError
from lockstep.launch.devices import Device
from lockstep.launch.processes import failure_records, fork_server, frames
from lockstep.launch.processes.failure_records import Death, Record
from lockstep.launch.processes.fork_server import Report
from lockstep.launch.processes.rank_output import Lines, Log

_PATIENCE = 0.4
"""Seconds from the first failure in which the other ranks may report theirs."""

_KILLING = 10.0
"""Seconds after which a killed rank that hasn't gone (it hangs in a driver, say) is left behind."""


@dataclass(eq=False)
class Rank:
    """What is known of one rank.

    Attributes:
        number, device: which it is.
        channel, out, err: pipes for its frames and, for rank 0, its output; (reading end, writing end).
        log: where the output of other ranks goes.
        pid: its process, once started.
        ended: how it ended, once it has.
        result: what its function returned, pickled, once it has.
        record: its own account of its failure.
    """

    number: int
    device: Device
    channel: tuple[int, int]
    out: tuple[int, int] | None = None
    err: tuple[int, int] | None = None
    log: Log | None = None
    pid: int | None = None
    ended: Report | None = None
    result: bytes | None = None
    record: Record | None = None

    def start(self, connection: socket.socket, call: int, more: Sequence[int] = ()) -> None:
        """Ask for its process, and let go of the ends of the pipes that belong there.

        Args:
            connection: of the launch.
            call: the file of the call.
            more: further open files that it is to have.
        """
        if self.log is not None:
            out = err = self.log.file.fileno()
        else:
            assert self.out is not None and self.err is not None
            out, err = self.out[1], self.err[1]
        fork_server.start_rank(connection, self.number, call, self.channel[1], out, err, more)
        self.close_theirs()

    def close_theirs(self) -> None:
        """Close the writing ends here; again is harmless."""
        for name in ("channel", "out", "err"):
            ends = getattr(self, name)
            if ends is not None and ends[1] >= 0:
                os.close(ends[1])
                setattr(self, name, (ends[0], -1))

    @property
    def heard(self) -> bool:
        """Whether it has said how it went, or is gone."""
        return self.record is not None or self.result is not None or self.ended is not None


class Supervisor:
    """The watch over one launch."""

    def __init__(
        self,
        connection: socket.socket,
        ranks: list[Rank],
        board: memoryview,
        on_event: Callable[[int, Any], None] | None,
        on_output: Callable[[str, str], None],
    ) -> None:
        self.connection = connection
        self.ranks = ranks
        self.board = board
        self.on_event = on_event
        self.reports = bytearray()
        self.failed_at: float | None = None
        self.killed_at: float | None = None
        self.lost = False
        connection.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ, self._hear_server)
        self.readers = [frames.Reader(rank.channel[0]) for rank in ranks]
        for rank in ranks:
            self.selector.register(rank.channel[0], selectors.EVENT_READ, partial(self._hear_rank, rank))
        self.streams: dict[int, Lines] = {}
        for rank in ranks:
            for ends, name in ((rank.out, "stdout"), (rank.err, "stderr")):
                if ends is not None:
                    os.set_blocking(ends[0], False)
                    self.streams[ends[0]] = Lines(partial(_to, on_output, name))
                    self.selector.register(ends[0], selectors.EVENT_READ, partial(self._relay, ends[0]))

    def watch(self) -> None:
        """Wait until all ranks have ended; raise where one has failed."""
        while not self._all_ended():
            if self.failed_at is not None and self.killed_at is None:
                over = time.monotonic() - self.failed_at
                if over >= _PATIENCE or all(rank.heard for rank in self.ranks):
                    self.kill()
            self.turn(self._until())
            if self.lost or (self.killed_at is not None and time.monotonic() > self.killed_at + _KILLING):
                break
        self._drain()
        failures = self.failures()
        if failures:
            first = failure_records.guilty(failures)
            silent = [] if self.lost else [rank.number for rank in self.ranks if not self._spoke(rank)]
            error = failure_records.to_raise(first, self.ranks[first.rank].device, silent)
            raise error from error.__cause__
        if self.lost:
            raise RunError("the process that forks the ranks has died, and they with it: launch again")

    def turn(self, seconds: float | None) -> None:
        """Hear what has come, and wait at most so long for it; None: until something comes."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def failures(self) -> list[Record | Death]:
        """Of the ranks that have failed so far."""
        return [failure for rank in self.ranks if (failure := self._failure(rank)) is not None]

    def kill(self) -> None:
        """Let the forking process kill every rank that still runs."""
        if self.killed_at is None:
            self.killed_at = time.monotonic()
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Make sure that no rank runs, whatever was raised, and wait until they are gone."""
        self.kill()
        limit = time.monotonic() + _KILLING
        while not self.lost and (left := limit - time.monotonic()) > 0:
            # The forking process closes the connection when the last rank has gone.
            with selectors.DefaultSelector() as only:
                only.register(self.connection, selectors.EVENT_READ)
                if only.select(left):
                    self._reports()

    def close(self) -> None:
        """Let go of what the loop held."""
        self.selector.close()
        self.board.release()

    def _until(self) -> float | None:
        """How long the loop may sleep."""
        if self.killed_at is not None:
            return max(0.0, self.killed_at + _KILLING - time.monotonic())
        if self.failed_at is not None:
            return max(0.0, self.failed_at + _PATIENCE - time.monotonic())
        return None

    def _all_ended(self) -> bool:
        return all(rank.ended is not None for rank in self.ranks)

    def _suspect(self) -> None:
        if self.failed_at is None:
            self.failed_at = time.monotonic()

    def _hear_server(self) -> None:
        for report in self._reports():
            rank = self.ranks[report.rank]
            if report.what == fork_server.NOT_STARTED:
                raise RunError(f"rank {rank.number} could not be started: {os.strerror(report.value)}")
            if report.what == fork_server.ENDED:
                self._take_frames(rank)  # all that it sent before it ended is in the pipe by now
                if rank.result is None:
                    self._suspect()

    def _reports(self) -> list[Report]:
        """The reports that have come, already noted at their ranks."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            self._lose_server()
            return []
        self.reports += data
        found = []
        while len(self.reports) >= fork_server.REPORT.size:
            report = Report(*fork_server.REPORT.unpack_from(self.reports))
            del self.reports[: fork_server.REPORT.size]
            if report.what == fork_server.STARTED:
                self.ranks[report.rank].pid = report.value
            elif report.what == fork_server.ENDED:
                self.ranks[report.rank].ended = report
            found.append(report)
        return found

    def _lose_server(self) -> None:
        """Its end was closed: after `stop` that means all ranks are gone, before it that it has died."""
        self.lost = True
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.connection)
        for rank in self.ranks:
            if rank.pid is not None and rank.ended is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)

    def _hear_rank(self, rank: Rank) -> None:
        more = self.readers[rank.number].read()
        self._open_frames(rank)
        if not more and rank.channel[1] < 0:
            with contextlib.suppress(KeyError):
                self.selector.unregister(rank.channel[0])

    def _take_frames(self, rank: Rank) -> None:
        while self.readers[rank.number].read():
            self._open_frames(rank)

    def _open_frames(self, rank: Rank) -> None:
        for kind, body in self.readers[rank.number].frames():
            if kind == frames.RESULT:
                rank.result = body
            elif kind == frames.FAILURE:
                rank.record = pickle.loads(body)
                self._suspect()
            elif self.on_event is not None:
                self.on_event(rank.number, pickle.loads(body))

    def _relay(self, number: int) -> bool:
        """Pass on what rank 0 printed; False where there is no more just now."""
        try:
            data = os.read(number, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.streams[number].feed(data)
        else:
            with contextlib.suppress(KeyError):
                self.selector.unregister(number)
        return bool(data)

    def _drain(self) -> None:
        """Pass on what is left of the output, without waiting for who may still hold the pipe."""
        limit = time.monotonic() + 1.0
        for number, lines in self.streams.items():
            while time.monotonic() < limit and self._relay(number):
                pass
            lines.end()

    def _failure(self, rank: Rank) -> Record | Death | None:
        if rank.record is not None:
            return rank.record
        if rank.result is not None or rank.ended is None or self._killed_by_us(rank.ended):
            return None
        words = rank.log.last_words() if rank.log is not None else ""
        return Death(rank.number, rank.ended.time, self.board[rank.number], rank.ended.value, words)

    def _killed_by_us(self, ended: Report) -> bool:
        return self.killed_at is not None and ended.value == -signal.SIGKILL and ended.time >= self.killed_at

    def _spoke(self, rank: Rank) -> bool:
        return rank.result is not None or self._failure(rank) is not None


def _to(on_output: Callable[[str, str], None], stream: str, text: str) -> None:
    on_output(text, stream)
