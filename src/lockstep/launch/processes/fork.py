"""The process that forks the ranks: imports what they need once, and is their one parent.

It sleeps until one of three things happens: a message (a rank to start), the end of a rank's life
connection (kill that rank), the end of a rank (report it). It runs no torch operation, so that it
has no threads of torch's when it forks.

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
from typing import NoReturn

from lockstep.launch.processes.fork_server import MOST_FILES, NOT_STARTED, REPORT, START
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
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    prepare()  # the ranks inherit it
    for name in _PRELOAD:
        importlib.import_module(name)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # no rank needs to undo what was imported here
    gc.collect()
    gc.freeze()  # no collection touches, and so copies, what the ranks share from here on
    # SIGTERM and SIGUSR1 may go to all processes at once; the person's process saves and ends
    # then, and this one ends with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    _Forking(socket.socket(fileno=control), parent).serve()


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, where the system has it."""
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Forking:
    """The state of this process: the ranks that run."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control = control
        self.parent = parent
        self.pid = os.getpid()
        self.lives: dict[int, socket.socket] = {}  # by process id
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.woken, self.wake = socket.socketpair()
        self.woken.setblocking(False)
        self.wake.setblocking(False)
        # A handler that does nothing: the byte that the signal writes is what counts.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        while os.getppid() == self.parent:
            for key, _ in self.selector.select(_LOOK):
                if key.fileobj is self.control:
                    self.start()
                elif key.fileobj is self.woken:
                    self.woken.recv(4096)
                else:  # the end of a life
                    self.selector.unregister(key.fileobj)
                    _kill_group(key.data)
            self.reap()
        self.end()

    def start(self) -> None:
        """Start a rank, or end where the control connection has ended."""
        message, files, _, _ = socket.recv_fds(self.control, START.size, MOST_FILES)
        if not message:
            self.end()
        life = socket.socket(fileno=files[0])
        try:
            pid = os.fork()
        except OSError as error:
            _report(life, NOT_STARTED + (error.errno or 0))
        else:
            if pid == 0:
                life.close()
                self.become(*START.unpack(message), *files[1:])
            # On both sides, since either may be the first to need it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self.lives[pid] = life
            self.selector.register(life, selectors.EVENT_READ, pid)
        for file in files[1:]:
            os.close(file)

    def become(self, number: int, out: int, err: int, *files: int) -> NoReturn:
        """In the child: drop what belongs to this process, and live as a rank."""
        try:
            os.setpgid(0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:  # it died before the line above
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for usual in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(usual, signal.SIG_DFL)
            # Else a child of the rank would hold the connections of others open.
            self.selector.close()
            for held in (self.control, self.woken, self.wake, *self.lives.values()):
                held.close()
            os.dup2(out, 1)
            os.dup2(err, 2)
            for file in (out, err, *files):
                os.set_inheritable(file, False)

            from lockstep.launch.processes.rank import run

            run(number, *files)
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Report the ranks that have ended; what is left in their process groups ends too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                life = self.lives.pop(pid, None)
                if life is None:
                    continue  # it was adopted
                _kill_group(pid)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(life)
                _report(life, os.waitstatus_to_exitcode(status))

    def end(self) -> NoReturn:
        """Kill all that was ever started here, wait until it is gone, and go."""
        for pid in self.lives:
            _kill_group(pid)
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        os._exit(0)


def _report(life: socket.socket, code: int) -> None:
    """Report the end of a rank, which is the end of its life connection."""
    with life, contextlib.suppress(OSError):  # nobody listens any more
        life.sendall(REPORT.pack(code, time.monotonic()))


def _children() -> list[int]:
    """Return the children of this process, adopted ones included, where the system lists them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]
    return []
