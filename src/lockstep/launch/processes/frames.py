"""What a rank sends back: frames through a pipe, each a kind, a length and that many bytes."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

EVENT, RESULT, FAILURE = b"e", b"r", b"f"

_HEAD = struct.Struct("!cQ")
_PIECE = 1 << 20


class Writer:
    """The rank's end. Threads may share it; a fork of the rank (a loader worker) stays silent."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, kind: bytes, body: bytes) -> None:
        """Send one frame whole, waiting for the reader where the pipe is full."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for data in (_HEAD.pack(kind, len(body)), body):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._number, rest) :]


class Reader:
    """The other end, which never waits."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held = bytearray()
        os.set_blocking(number, False)

    def read(self) -> bool:
        """Take what the pipe holds just now, up to a limit; False where there is nothing (more) to come."""
        try:
            data = os.read(self._number, _PIECE)
        except BlockingIOError:
            return False
        self._held += data
        return bool(data)

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """The frames that are complete."""
        while len(self._held) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._held)
            end = _HEAD.size + length
            if len(self._held) < end:
                return
            with memoryview(self._held) as view:
                body = bytes(view[_HEAD.size : end])
            del self._held[:end]
            yield kind, body
