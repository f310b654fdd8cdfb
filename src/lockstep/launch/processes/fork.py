"""The process that forks the ranks: imports what they need once, and is their one parent.

It sleeps until one of three things happens: a message (a new launch, or a rank to start), the end
of a connection (kill that launch's ranks), the end of a rank (report it). It runs no torch
operation, so that it has no threads of torch's when it forks.

Nothing that it started outlives the person's process. When that dies in whatever way, the control
connection ends, or this process notices that it has another parent (a copy of the connection may
live on in some child of the person's process). It then kills each rank's process group, and
whatever moved out of those: as the subreaper of its descendants it becomes their parent. Should it
be killed itself, the ranks get SIGKILL from the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import NoReturn

from lockstep.launch.processes.fork_server import MOST_FILES, REPORT, START
from lockstep.tensors.allocator import prepare

_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",  # imported by the first optimizer or DDP, in as much time as torch itself
    "torch.nn.parallel",
    "torch.utils.data",
    "cloudpickle",
    "lockstep.launch.world",
    "lockstep.launch.processes.rank",
    "lockstep.map.map_worker",
    "lockstep.training.loop",
)

_LOOK = 0.5
"""Seconds between looks at whether the person's process is still the parent."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, parent: int) -> NoReturn:
    """Serve on the open file ``control`` until the person's process, of the id ``parent``, is
    gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Who sends a signal to all processes at once means that the person's saves and ends: this one
    # ends with it.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    prepare()  # the ranks inherit it
    for name in _PRELOAD:
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = (
            False  # of torch's operators: no rank needs to undo what was imported here
        )
    gc.collect()
    # what is there now is shared with the ranks: a collection must not touch, and so copy, it
    gc.freeze()
    _Forking(socket.socket(fileno=control), parent).serve()


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, where the system has it."""
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class _Launch:
    connection: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)
    """From process id to rank."""
    over: bool = False

    def report(self, rank: int, code: int, error: int = 0) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self.connection.sendall(REPORT.pack(rank, code, error, time.monotonic()))

    def kill(self) -> None:
        for pid in self.ranks:
            _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Forking:
    """The state of this process: the launches that are under way."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control = control
        self.parent = parent
        self.pid = os.getpid()
        self.launches: list[_Launch] = []
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.woken, self.wake = socket.socketpair()
        self.woken.setblocking(False)
        self.wake.setblocking(False)
        signal.signal(
            signal.SIGCHLD, lambda *_: None
        )  # the byte that its arrival writes is what counts
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self.accept)
        self.selector.register(self.woken, selectors.EVENT_READ, lambda: self.woken.recv(4096))

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            for key, _ in self.selector.select(_LOOK):
                key.data()
            self.reap()
        self.end()

    def accept(self) -> None:
        """Take a new launch, or end where the control connection has ended."""
        _, files = _received(self.control, 1)
        if not files:
            self.end()
        launch = _Launch(socket.socket(fileno=files[0]))
        self.launches.append(launch)
        self.selector.register(launch.connection, selectors.EVENT_READ, lambda: self.hear(launch))

    def hear(self, launch: _Launch) -> None:
        """Start a rank, or end the launch where its connection has ended."""
        message, files = _received(launch.connection, START.size)
        if message:
            self.fork(launch, START.unpack(message)[0], files)
            return
        self.selector.unregister(launch.connection)
        launch.over = True
        launch.kill()
        self.forget(launch)

    def fork(self, launch: _Launch, rank: int, files: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            launch.report(rank, 1, error.errno or -1)
        else:
            if pid == 0:
                self.become(rank, files)
            with contextlib.suppress(
                OSError
            ):  # on both sides, since either may be first to need it
                os.setpgid(pid, pid)
            launch.ranks[pid] = rank
        for number in files:
            os.close(number)

    def become(self, rank: int, files: list[int]) -> NoReturn:
        """In the child: drop what belongs to this process, and live as a rank."""
        try:
            os.setpgid(0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:  # it died before the line above
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for usual in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(usual, signal.SIG_DFL)
            self.selector.close()
            for held in (
                self.control,
                self.woken,
                self.wake,
                *(launch.connection for launch in self.launches),
            ):
                held.close()
            call, channel, out, err, *blocks = files
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            for number in (call, channel, *blocks):
                os.set_inheritable(number, False)

            from lockstep.launch.processes.rank import run

            run(rank, call, channel, blocks)
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Report the ranks that have ended; what they left behind in their process group ends
        too.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                for launch in [launch for launch in self.launches if pid in launch.ranks]:
                    _kill_group(pid)
                    launch.report(launch.ranks.pop(pid), os.waitstatus_to_exitcode(status))
                    self.forget(launch)

    def forget(self, launch: _Launch) -> None:
        if launch.over and not launch.ranks:
            launch.connection.close()
            self.launches.remove(launch)

    def end(self) -> NoReturn:
        """Kill all that was ever started here, wait until it is gone, and go."""
        for launch in self.launches:
            launch.kill()
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        os._exit(0)


def _received(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """A message and the files attached to it; nothing where the connection has ended."""
    try:
        message, files, _, _ = socket.recv_fds(connection, size, MOST_FILES)
    except ConnectionError:
        return b"", []
    return message, files


def _children() -> list[int]:
    """The children of this process, adopted ones included, where the system lists them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]
    return []
