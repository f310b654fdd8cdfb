"""What ranks print: rank 0's lines come out above, live; the others' go to files."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable
from typing import IO

_TAIL = 4000
"""Characters of a log that are shown as a dead rank's last words."""


class Lines:
    """Bytes in, whole lines of text out. A carriage return ends a line too: progress bars rewrite theirs."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Take some bytes, and pass on the lines that they complete."""
        text = self._rest + self._decoder.decode(data)
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._rest = text[cut:]
        if cut:
            self._write(text[:cut])

    def end(self) -> None:
        """Pass on what is left."""
        text, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        if text:
            self._write(text)


def to_own_streams(text: str, stream: str) -> None:
    """Print what rank 0 printed, on whatever ``sys.stdout`` or ``sys.stderr`` is now (a notebook's, say)."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is not None:
        target.write(text)
        target.flush()


class Log:
    """The file of a rank that isn't rank 0; a later launch with the same folder adds to it."""

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(folder, exist_ok=True)
        # Held open: its last words are read when the folder may be gone.
        self.file: IO[bytes] = open(os.path.join(folder, f"{rank}.log"), "a+b")  # noqa: SIM115
        self._start = self.file.seek(0, os.SEEK_END)

    def last_words(self) -> str:
        """The end of what was written since this launch began."""
        self.file.seek(0, os.SEEK_END)
        self.file.seek(max(self._start, self.file.tell() - _TAIL))
        return self.file.read().decode("utf-8", "replace").strip()
