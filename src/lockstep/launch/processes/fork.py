"""The process that forks the ranks: imports what they need once, and is their one parent.

It sleeps until one of three things happens: a message (a new launch, or a rank to start), the end of a connection (kill
that launch's ranks), the end of a rank (report it). It runs no torch operation, so that it has no threads of torch's
when it forks.

Nothing that it started outlives the person's process. When that dies in whatever way, the control connection ends, or
this process notices that it has another parent (a copy of the connection may live on in some child of the person's
process). It then kills each rank's process group, and whatever moved out of those: as the subreaper of its descendants
it becomes their parent. Should it be killed itself, the ranks get SIGKILL from the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import NoReturn

from lockstep.launch.processes.fork_server import ENDED, MOST_FILES, NOT_STARTED, PATH_BYTES, REPORT, START, STARTED
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
)

_LOOK = 0.5
"""Seconds between looks at whether the person's process is still the parent."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, parent: int) -> NoReturn:
    """Serve until the person's process is gone.

    Args:
        control: the control connection, an open file.
        parent: the process id of the person's process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    prepare()  # the ranks inherit it
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is there now is shared with the ranks: a collection must not touch, and so copy, it
    _Forking(socket.socket(fileno=control), parent).serve()


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, where the system has it."""
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class _Launch:
    connection: socket.socket
    scratch: str
    ranks: dict[int, int] = field(default_factory=dict)
    """From process id to rank."""
    over: bool = False

    def report(self, what: bytes, rank: int, value: int) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self.connection.sendall(REPORT.pack(what, rank, value, time.monotonic()))

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
        self.woken, self.wake = os.pipe()
        for end in (self.woken, self.wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the byte that its arrival writes is what counts
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            for key, _ in self.selector.select(_LOOK):
                if key.fileobj is self.control:
                    if not self.accept():
                        self.end()
                elif key.fileobj == self.woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.woken, 4096)
                else:
                    self.hear(key.data)
            self.reap()
        self.end()

    def accept(self) -> bool:
        """Take a new launch; False where the control connection has ended."""
        try:
            path, files, _, _ = socket.recv_fds(self.control, PATH_BYTES, 1)
        except ConnectionError:
            return False
        if not path:
            return False
        launch = _Launch(socket.socket(fileno=files[0]), os.fsdecode(path.rstrip(b"\0")))
        self.launches.append(launch)
        self.selector.register(launch.connection, selectors.EVENT_READ, launch)
        return True

    def hear(self, launch: _Launch) -> None:
        """Start a rank, or end the launch where its connection has ended."""
        try:
            message, files, _, _ = socket.recv_fds(launch.connection, START.size, MOST_FILES)
        except ConnectionError:
            message, files = b"", []
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
            launch.report(NOT_STARTED, rank, error.errno or 0)
        else:
            if pid == 0:
                self.become(rank, files)
            with contextlib.suppress(OSError):  # on both sides, since either may be first to need it
                os.setpgid(pid, pid)
            launch.ranks[pid] = rank
            launch.report(STARTED, rank, pid)
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
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            for held in (self.control, *(launch.connection for launch in self.launches)):
                held.close()
            call, channel, out, err, *more = files
            os.dup2(out, 1)
            os.dup2(err, 2)
            for number in (self.woken, self.wake, out, err):
                os.close(number)
            for number in (call, channel, *more):
                os.set_inheritable(number, False)

            from lockstep.launch.processes.rank import run

            run(rank, call, channel, more)
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Report the ranks that have ended; what they left behind in their process group ends too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for launch in self.launches:
                if pid in launch.ranks:
                    _kill_group(pid)
                    launch.report(ENDED, launch.ranks.pop(pid), os.waitstatus_to_exitcode(status))
                    self.forget(launch)
                    break

    def forget(self, launch: _Launch) -> None:
        if launch.over and not launch.ranks:
            shutil.rmtree(launch.scratch, ignore_errors=True)
            launch.connection.close()
            self.launches.remove(launch)

    def end(self) -> NoReturn:
        """Kill all that was ever started here, wait until it is gone, and go."""
        for launch in self.launches:
            launch.kill()
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        for launch in self.launches:
            shutil.rmtree(launch.scratch, ignore_errors=True)
        os._exit(0)


def _children() -> list[int]:
    """The children of this process, adopted ones included, where the system lists them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]
    return []
