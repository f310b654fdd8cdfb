"""Who failed first.

When one rank fails, the others fail for want of it within milliseconds: their collectives find the
connection closed. So each rank that raises writes a record at once, with the moment, and with
whether its error looks like that of a rank whose *peer* has gone; the forking process tells how
ranks without a record ended. The rank to name is

1. the earliest that failed by itself: an error that isn't a peer's, a signal that wasn't ours, an
  exit with no result;
2. else the earliest that was aborted: PyTorch's watchdogs abort a rank also when a peer has failed;
3. else the earliest whose error looks like a peer's, a time-out, say.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cloudpickle

from lockstep.errors import LockstepError, RankFailed, first_line, own_traceback
from lockstep.launch.devices import Device

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


@dataclass(frozen=True)
class Record:
    """A rank's own account of its failure.

    Attributes:
        time: when the exception was caught, on the clock that all processes share.
        step: the step it was in.
        reason, traceback: as `reason` and `own_traceback` give them.
        peer: whether it looks like the failure of a rank that lost another.
        pickled: the exception itself, where it can be pickled.
    """

    rank: int
    time: float
    step: int
    reason: str
    traceback: str
    peer: bool
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, time: float, rank: int, step: int) -> Record:
        """Make the record of an exception that was just caught."""
        return cls(
            rank,
            time,
            step,
            reason(error),
            own_traceback(error),
            looks_like_peers(error),
            _pickled(error),
        )

    def exception(self) -> BaseException | None:
        """Return the exception, where it can be had in this process."""
        try:
            error = None if self.pickled is None else pickle.loads(self.pickled)
        except Exception:
            return None  # of a class that can't be imported here, or can't be made from its args
        return error if isinstance(error, BaseException) else None


@dataclass(frozen=True)
class Death:
    """The end of a rank that left neither a record nor a result.

    Attributes:
        time: when it was noticed.
        step: the step it was in.
        code: its exit code, or minus the number of the signal that ended it.
        last_words: what stands at the end of its log.
    """

    rank: int
    time: float
    step: int
    code: int
    last_words: str = ""


class RankTraceback(Exception):
    """A rank's traceback as text, put below an exception so that it is shown where that is
    shown.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}" if self.args else ""


def guilty(failures: Iterable[Record | Death]) -> Record | Death:
    """Return the failure that came first, as described at the top of this module."""
    return min(failures, key=lambda one: (_class_of(one), one.time))


def _class_of(one: Record | Death) -> int:
    if isinstance(one, Record):
        return 3 if one.peer else 1
    return 2 if one.code == -signal.SIGABRT else 1


def to_raise(one: Record | Death, devices: Sequence[Device], silent: list[int]) -> BaseException:
    """Make the exception for the failure of a rank.

    The ``silent`` ranks, which reported nothing, may be why it failed.
    """
    who = f"rank {one.rank} ({', '.join(map(str, devices))})"
    if isinstance(one, Death):
        why = ", before its function returned" if one.code >= 0 else ""
        if one.code == -signal.SIGABRT:
            why = (
                "; gloo fails like this if ranks are in different collectives: under fsdp "
                "possibly in a block that only some samples use: name the other blocks by "
                "--blocks NAMES"
            )
        return RankFailed(
            f"{who} {ending(one.code, when(one.step))}{why}", one.rank, one.step, one.last_words
        )
    error = one.exception()
    if isinstance(error, LockstepError):
        # Ours say all in one line; where it happened is kept beside.
        error.__dict__.setdefault("rank", one.rank)
        if not error.__dict__.get("traceback"):
            error.__dict__["traceback"] = one.traceback
        return error
    if isinstance(error, SystemExit):
        message = f"{who} left by {one.reason} {when(one.step)}, before its function returned"
    else:
        message = f"{who} failed {when(one.step)}: {one.reason}"
    if one.peer and silent:
        message += f"; no report from rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    return caused(RankFailed(message, one.rank, one.step, one.traceback), one)


def caused(made: BaseException, record: Record) -> BaseException:
    """Give an exception the one of the record as its cause, which shows its traceback where it
    is shown.
    """
    error = record.exception()
    shown = RankTraceback(record.traceback)
    if isinstance(error, Exception):
        error.__cause__ = shown
        made.__cause__ = error
    else:
        made.__cause__ = shown
    return made


def when(step: int) -> str:
    """``at step 17``, or ``before the first step``."""
    return f"at step {step}" if step else "before the first step"


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
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


def _pickled(error: BaseException) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return None


def ending(code: int, where: str) -> str:
    """Return how a process ended that wasn't asked to: by an exit code, or minus the number of a
    signal.
    """
    if code >= 0:
        return f"exited with code {code} {where}"
    names = {number.value: number.name for number in signal.Signals}
    advice = " (possibly out of memory: check dmesg)" if code == -signal.SIGKILL else ""
    return f"was killed by {names.get(-code, f'signal {-code}')} {where}{advice}"
