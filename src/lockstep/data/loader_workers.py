"""Fetching in loader workers: processes of their own, kept over the epochs, that end when their
parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data.fetch import base_of
from lockstep.errors import JobError, LockstepError, Lost
from lockstep.launch.cores import bound_by_launcher
from lockstep.launch.devices import usable_cores
from lockstep.launch.world import World
from lockstep.run.stop_request import GRACE

Fetching = Callable[..., Any]
"""A Fetcher, or what reads a stream."""

Request = tuple[Any, ...]
"""What a fetcher is called with: an epoch, and the indices of each share that isn't empty, say."""

_PR_SET_PDEATHSIG = 1

_LETS_GO = 0.001
"""Seconds in which gloo's threads let go of the tensors of an exchange that has just ended.

They take the interpreter's lock over its threads for that, and CPython 3.11 waits for it for ever
in a process that is forked meanwhile (``PyOS_AfterFork_Child``): a loader worker that never began
was seen once.
"""


def default_workers(
    cores: int, ranks_on_node: int, dataset: Any, *, on_accelerator: bool = False
) -> int:
    """Return how many loader workers each rank gets: the cores without a rank, shared out.

    At most two a rank, which computes on cores, too; on an accelerator, which reads faster than
    that, at most eight. A tensor dataset gets none: indexing it is cheaper than sending the result.
    """
    if type(base_of(dataset)) is TensorDataset:
        return 0
    return max(0, min(8 if on_accelerator else 2, (cores - ranks_on_node) // ranks_on_node))


def workers_here(
    dataset: Any, world: World | None, *, readers: int = 1, on_accelerator: bool
) -> int:
    """Return ``default_workers`` for the cores and the ranks of this machine.

    Args:
        dataset: what they read.
        world: this process's; None where there is none.
        readers: local batches that this process reads, each with workers of its own.
        on_accelerator: whether the model is on one.
    """
    cores = free_cores()
    ranks = 1 if world is None or bound_by_launcher(cores) else world.local_size
    if on_accelerator:
        ranks *= readers
    return default_workers(len(cores), ranks, dataset, on_accelerator=on_accelerator)


def free_cores() -> tuple[int, ...]:
    """Return the cores that this process was given, also after its computing thread was pinned to
    some of them.

    Threads keep the mask they began with, so the widest of this process's threads knows.
    """
    found = set(usable_cores())
    if hasattr(os, "sched_getaffinity"):
        try:
            for thread in os.listdir("/proc/self/task"):
                found |= os.sched_getaffinity(int(thread))
        except OSError:  # no /proc, or a thread that has just ended
            pass

    return tuple(sorted(found))


class _Remote:
    """Holds a fetcher in a worker: for each request there is what it gives, or the failure."""

    def __init__(self, fetcher: Fetching) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._fetcher(*request)
        except LockstepError as error:
            return ExceptionWithTraceback(error, error.__traceback__)

    def __reduce__(self) -> tuple[Any, ...]:
        # Where workers can't be forked, the dataset may still be a local class, or hold a lambda.
        return _unpacked, (cloudpickle.dumps(self._fetcher),)


def _unpacked(fetcher: bytes) -> _Remote:
    return _Remote(cloudpickle.loads(fetcher))


@contextlib.contextmanager
def without_worker_info() -> Iterator[None]:
    """Hide that this is a loader worker from a stream: one worker reads all, and some streams (of
    ``datasets``) shuffle otherwise.
    """
    module = torch.utils.data._utils.worker
    before, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = before


class _Requests:
    """The sampler of one epoch after another.

    Attributes:
        now: the requests of the epoch that is fetched.
    """

    def __init__(self) -> None:
        self.now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


class Workers:
    """Loader workers of one rank, each with a copy of the fetcher.

    They start with the first request.

    Args:
        fetcher: what makes the answers.
        count: how many workers.
        pin: whether answers are to come in pinned memory.
    """

    def __init__(self, fetcher: Fetching, count: int, pin: bool) -> None:
        self._requests = _Requests()
        on_linux = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
        cores = free_cores()
        by_main_thread = threading.current_thread() is threading.main_thread()
        with warnings.catch_warnings():
            # PyTorch counts only the cores of this thread, which may be pinned.
            warnings.filterwarnings("ignore", message=".*worker processes in total.*")
            self._loader: DataLoader[Any] | None = DataLoader(
                _Remote(fetcher),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._requests,
                num_workers=count,
                collate_fn=_as_it_is,
                pin_memory=pin,
                persistent_workers=True,
                # Its seeds are drawn from here; by default they would move the global generator.
                generator=torch.Generator(),
                multiprocessing_context="fork" if on_linux else None,
                worker_init_fn=functools.partial(_begin, os.getpid(), by_main_thread, cores),
            )

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield what the fetcher gives for each request, in order, or raise its error. A second
        call ends the first.
        """
        if self._loader is None:
            raise JobError("loader_workers: this loader is closed")
        self._requests.now = requests
        if self._loader._iterator is None:  # it forks now
            time.sleep(_LETS_GO)
        with warnings.catch_warnings():  # a training says it, in a line
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            answers = iter(self._loader)

        _hear_deaths_where_waiting()
        while True:
            try:
                found = _next(answers)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise Lost(
                    "a loader worker was killed (possibly out of memory: check dmesg): set fewer "
                    "loader_workers, or 0"
                ) from error
            if isinstance(found, LockstepError):
                raise found
            yield found

    def close(self) -> None:
        """End the workers, now: an error's traceback may hold the loader until nobody can tell
        them any more.
        """
        iterator = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:
            iterator._shutdown_workers()


_waiting = False
"""Whether the main thread waits for a loader worker: only then may the death of one raise."""


def _next(answers: Iterator[Any]) -> Any:
    """Wait for the next answer of a loader worker."""
    global _waiting
    torch._C._error_if_any_worker_fails()
    _waiting = True
    try:
        return next(answers)
    finally:
        _waiting = False


def _hear_deaths_where_waiting() -> None:
    """Let PyTorch's handler of a child's death, which raises wherever the main thread is, do so
    in waiting only.
    """
    theirs: Any = signal.getsignal(signal.SIGCHLD)
    if getattr(theirs, "__module__", "") == "torch.utils.data._utils.signal_handling":

        def handler(number: int, frame: object) -> None:
            if _waiting:
                theirs(number, frame)

        signal.signal(signal.SIGCHLD, handler)


def _as_it_is(found: Any) -> Any:
    return found


def _begin(parent: int, by_main_thread: bool, cores: Sequence[int], worker: int) -> None:
    """In a new worker: die with the parent, leave signals to it, and use the cores that it
    doesn't compute on too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if sys.platform != "linux":
        return
    _reopen_files()
    # The signal comes when the parent's *thread* ends, so only the main thread's end means the
    # parent's.
    if by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before the line above
            os._exit(1)


def _reopen_files() -> None:
    """Give this process positions of its own in the files that it may read.

    A fork shares the position of each file that was open before, and reading moves it: of two
    workers whose dataset seeks and reads, one would read where the other went.
    """
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):  # it was closed, or may not be opened anew
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            is_written = flags & (os.O_WRONLY | os.O_APPEND)
            if number <= 2 or is_written or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            own = os.open(f"/proc/self/fd/{name}", flags & os.O_ACCMODE)
            os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, inheritable=False)
            os.close(own)


def _end_later(number: int, frame: object) -> None:
    """Where a signal came to all processes, the training needs its samples until the step has
    ended.
    """
    timer = threading.Timer(GRACE, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()
