"""Ctrl-C while a command runs: one line and exit code 130, whatever is imported and however often it is pressed."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from types import FrameType

from lockstep.launch.processes import fork_server


class Interrupt:
    """Listens for Ctrl-C from now until ``over``; pressed twice in a row it is one, since ending takes a moment.

    Modules that are being imported make other exceptions of it (NumPy an `ImportError`), so its time is kept; and torch
    swallows it when it looks for NumPy, but then nothing was begun, and the process may end where it stands.

    Args:
        line: what is said of it.
    """

    CODE = 130
    """The exit code of a command that was stopped so."""

    _ONE = 2.0
    """Seconds that belong to one Ctrl-C."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._pressed = -math.inf
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:  # elsewhere somebody has decided otherwise: nohup, say
            signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.just_now():
            return
        self._pressed = time.monotonic()
        if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
            fork_server.stop()
            os._exit(self.said())
        raise KeyboardInterrupt

    def just_now(self) -> bool:
        """Whether what is raised now may be for its sake."""
        return time.monotonic() - self._pressed < self._ONE

    def said(self) -> int:
        """Say it; gives the exit code."""
        sys.stderr.write(self._line + "\n")
        sys.stderr.flush()
        return self.CODE

    def over(self) -> None:
        """Listen no more."""
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)
