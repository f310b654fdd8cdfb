"""Who failed first.

When one rank fails, the others fail for want of it within milliseconds: their collectives find the
connection closed. So each rank that raises reports at once, with the moment, and with whether its
error looks like that of a rank whose *peer* has gone; the forking process tells how ranks without a
report ended. The rank to name is

1. the earliest that failed by itself: an error that isn't a peer's, a signal that wasn't ours, an
  exit with no result;
2. else the earliest that was aborted: PyTorch's watchdogs abort a rank also when a peer has failed;
3. else the earliest whose error looks like a peer's, a time-out, say.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cloudpickle

from lockstep.errors import LockstepError, RankFailed, first_line, own_traceback
from lockstep.launch.devices import Device
from lockstep.launch.processes.fork_server import NOT_STARTED

_PEER_TYPES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "pair closure",
    "nccl",
)

_ADVICE = {
    -signal.SIGKILL: " (possibly out of memory: check dmesg)",
    -signal.SIGABRT: (
        "; gloo fails like this if ranks are in different collectives: under fsdp "
        "possibly in a block that only some samples use: name the other blocks by --blocks NAMES"
    ),
}


@dataclass(frozen=True)
class Failure:
    """How a rank has failed: by its own account, or by the end of its process.

    Attributes:
        time: when, on the clock that all processes share.
        step: the step it was in.
        how: ``failed``, ``was killed by SIGKILL``; where it was comes behind.
        why: what comes behind that: the error, or advice.
        traceback: that of its exception, or what stands at the end of its log.
        order: the place of its kind in the list at the top of this module.
        pickled: its exception, where that can be pickled.
    """

    rank: int
    time: float
    step: int
    how: str
    why: str
    traceback: str = ""
    order: int = 1
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException, time: float, rank: int, step: int) -> Failure:
        """Return that of a rank which has just caught an exception."""
        pickled = None
        with contextlib.suppress(Exception):
            pickled = bytes(cloudpickle.dumps(error))
        order = 3 if looks_like_peers(error) else 1
        trace = own_traceback(error)
        return cls(rank, time, step, "failed", f": {reason(error)}", trace, order, pickled)

    @classmethod
    def of_end(cls, code: int, time: float, rank: int, step: int, last_words: str) -> Failure:
        """Return that of a rank which left neither an account nor a result, by its exit code, or
        minus the number of the signal that ended it.
        """
        how, why = f"exited with code {code}", ", before its function returned"
        if code >= NOT_STARTED:
            how, why = "could not be started", f": {os.strerror(code - NOT_STARTED)}"
        elif code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
            why = _ADVICE.get(code, "")
        order = 2 if code == -signal.SIGABRT else 1
        return cls(rank, time, step, how, why, last_words, order)

    def exception(self) -> BaseException | None:
        """Return the exception, where it can be had in this process."""
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # of a class that can't be made here, say
                error = pickle.loads(self.pickled)
                return error if isinstance(error, BaseException) else None
        return None

    def causes(self, made: BaseException) -> BaseException:
        """Give an exception that of the rank as its cause, which shows the traceback where it is
        shown.
        """
        error = self.exception()
        shown = RankTraceback(self.traceback)
        if isinstance(error, Exception):
            error.__cause__ = shown
            made.__cause__ = error
        elif self.traceback:
            made.__cause__ = shown
        return made


class RankTraceback(Exception):
    """A rank's traceback as text, put below an exception so that it is shown where that is
    shown.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}" if self.args else ""


def guilty(failures: Iterable[Failure]) -> Failure:
    """Return the failure that came first, as described at the top of this module."""
    return min(failures, key=lambda one: (one.order, one.time))


def to_raise(one: Failure, devices: Sequence[Device], silent: list[int]) -> BaseException:
    """Make the exception for the failure of a rank.

    The ``silent`` ranks, which reported nothing, may be why it failed.
    """
    error = one.exception()
    if isinstance(error, LockstepError):
        # Ours say all in one line; where it happened is kept beside.
        held = vars(error)
        held.setdefault("rank", one.rank)
        held["traceback"] = held.get("traceback") or one.traceback
        return error
    who = f"rank {one.rank} ({', '.join(map(str, devices))})"
    message = f"{who} {one.how} {when(one.step)}{one.why}"
    if one.order == 3 and silent:
        message += f"; no report from rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    return one.causes(RankFailed(message, one.rank, one.step, one.traceback))


def when(step: int) -> str:
    """``at step 17``, or ``before the first step``."""
    return f"at step {step}" if step else "before the first step"


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return f"{name}: {line}" if str(error).strip() else name


def looks_like_peers(error: BaseException) -> bool:
    """Return whether an error, or one that it came from, is what a rank sees that lost another."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if any(cls.__name__ in _PEER_TYPES for cls in type(one).__mro__):
            return True
        if isinstance(one, RuntimeError | OSError) and any(
            words in str(one).lower() for words in _PEER_WORDS
        ):
            return True
        one = one.__cause__ or one.__context__
    return False
