"""Ctrl-C, SIGTERM and SIGUSR1 while a training runs: it is saved at the end of its step, and can be
resumed.

::

    signal ──> StopRequest ──> this process, or the board of the ranks ──> world.asked_to_stop() ──> all ranks agree
                                                                           (in the step's sum)       and save

A second signal, or some time in which the step doesn't end (``grace``), stops at once. So does the
first one before the first step, when there is nothing to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self, cast

GRACE = 30.0
"""Seconds that the step may take to end, and the checkpoint to be written."""

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
"""Exit codes by signal. SLURM warns by SIGUSR1 of the SIGTERM that it will send."""

_current: StopRequest | None = None


def asked() -> bool:
    """Return whether this process has been asked to stop."""
    return _current is not None and _current.number is not None


@contextlib.contextmanager
def reaching(ranks: memoryview) -> Iterator[None]:
    """Pass a signal on to ranks of ours for a while, by their board, where this process listens
    for one.
    """
    request = _current
    if request is not None:
        request.ranks = ranks
    try:
        yield
    finally:
        if request is not None:
            request.ranks = None


class _Failed(BaseException):
    """Leaves the main thread's code, through all that catches exceptions or Ctrl-C."""


def fail(error: Exception) -> None:
    """Raise an error in the training of this process, from another thread, where it runs in the
    main one.
    """
    if _current is not None and _current.before:
        _current.error = error
        main = cast("int", threading.main_thread().ident)
        signal.pthread_kill(main, signal.SIGUSR1)  # ends a wait, too


def leave_to_the_launcher() -> None:
    """In a rank of ours, hear nothing of a signal that came to all processes: the launching one
    tells the ranks.

    (Not by ignoring it, which programs that are started here would inherit.)
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


class StopRequest:
    """Listens for Ctrl-C, SIGTERM and SIGUSR1, in a ``with``, in the main thread of the process
    that a person started.

    Args:
        began: whether there is something to save; until then a signal does what it did before.
        grace: seconds after which the process stops, whether or not the step has ended.

    Attributes:
        number: of the signal that came, or None.
        error: what is to be raised in the main thread.
        before: the handlers of before, while it listens; none in a thread of a person's own.
        ranks: the board on which ranks of ours look (see `lockstep.launch.processes.call`); None where there are
            none.
    """

    def __init__(self, began: Callable[[], bool], grace: float = GRACE) -> None:
        self.number: int | None = None
        self.error: Exception | None = None
        self.ranks: memoryview | None = None
        self.before: dict[int, Any] = {}
        self._began, self._grace, self._process = began, grace, os.getpid()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        global _current
        self._outer, _current = _current, self
        if threading.current_thread() is threading.main_thread():
            for number in _CODES:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global _current
        _current = self._outer
        if self._timer is not None:
            self._timer.cancel()
        for number, before in self.before.items():
            signal.signal(number, before)
        if self.error is not None and isinstance(error, _Failed):
            raise self.error from None

    def raise_if_asked(self) -> None:
        """Raise what the signal would have raised by itself.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was SIGTERM or SIGUSR1; with 143.
        """
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is not None:
            raise SystemExit(_CODES[signal.Signals(self.number)])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._process
        ):  # a loader worker, which is ended before it has handlers of its own
            os._exit(128 + number)
        if self.error is not None:
            raise _Failed
        began = self._began() if self.ranks is None else max(self.ranks[:-1]) > 1
        if self.number is not None or not began:
            before = self.before[number]
            if not callable(before):
                sys.exit(_CODES[signal.Signals(number)])
            before(number, frame)
            return
        self.number = number
        if self.ranks is not None:
            self.ranks[-1] = 1
        self._timer = threading.Timer(self._grace, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
        # Not by print: the signal may have come in the middle of another print.
        with contextlib.suppress(OSError):
            os.write(2, b"\nlockstep: stopping at the end of this step; once more stops at once\n")
