"""The process that forks the ranks, seen from the person's process: start it, reach it, end it.

One such process serves all launches of this one. It takes a while to import torch, once; a rank
forked from it starts in some hundredths of a second. `lockstep.launch.processes.fork` is what runs
there.

::

    person's process ──control──> forking process ──fork──> rank 0, rank 1, ...
                     ──launch───>      (one connection per launch; each end of it that closes ends that launch)

The control connection carries nothing but the other ends of launch connections. Along one of those
go the numbers of ranks to start, each with its open files, and come back reports (`Report`).

Library settings that torch reads only once, while it is imported (``OMP_NUM_THREADS``,
``TORCH_LOGS``), are those of the environment at `start`; every other variable is seen by ranks as
it is at their launch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

START = struct.Struct("!I")
"""A message that starts a rank: its number."""

MOST_FILES = 32
"""Files that may be attached to a message."""

REPORT = struct.Struct("!Iiid")


class Report(NamedTuple):
    """What the forking process says of a rank that has ended, or could not be forked.

    Attributes:
        rank: its number.
        code: how it ended, as ``os.waitstatus_to_exitcode`` gives it.
        error: the system's error number where it could not be forked, else 0.
        time: when, on the clock that all processes share.
    """

    rank: int
    code: int
    error: int
    time: float


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket


_lock = threading.Lock()
_server: _Server | None = None
_used = False
"""Whether it was ever asked for a rank: until then there is nothing for it to clean up."""


def start() -> None:
    """Start the forking process, unless it runs already; it gets ready while the caller goes on."""
    with _lock:
        _running()


def connect() -> socket.socket:
    """A connection for one launch. Half-closing it kills the launch's ranks; closing it does so
    without word.
    """
    global _used
    ours, theirs = socket.socketpair()
    with theirs, _lock:
        try:
            socket.send_fds(_running().control, [b"+"], [theirs.fileno()])
        except OSError:  # it has died
            _end()
            socket.send_fds(_running().control, [b"+"], [theirs.fileno()])
        _used = True
    return ours


def start_rank(connection: socket.socket, rank: int, files: Sequence[int]) -> None:
    """Ask for a rank that has these open files: call, channel, standard output, standard error,
    and any others.
    """
    socket.send_fds(connection, [START.pack(rank)], files)


def stop() -> None:
    """End the forking process, and with it all that was started through it; the next launch
    starts another.
    """
    with _lock:
        _end()


def _running() -> _Server:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # -P: a file in the current folder must not stand in for a module of the same name.
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A session of its own: Ctrl-C in a terminal reaches the person's process, which
                # decides.
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        _server = _Server(process, ours)
    return _server


_PROGRAM = (
    "import sys; from lockstep.launch.processes import fork; fork.main(int(sys.argv[1]), "
    "int(sys.argv[2]))"
)


def _environment() -> dict[str, str]:
    """The environment of this process, with its import path, so that both find the same modules."""
    source = str(Path(__file__).resolve().parents[3])
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*path, source])),
        # Looking for CUDA devices must not initialise CUDA there: forked ranks could no longer use
        # it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _end() -> None:
    global _server, _used
    if _server is None:
        return
    process, control = _server
    _server = None
    control.close()  # which tells it to kill all ranks and go
    if not _used:
        process.kill()  # it may still be importing, and hear nothing
    _used = False
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _forget() -> None:
    """In a fork of the person's process: the forking process belongs to the parent alone."""
    global _lock, _server
    _lock = threading.Lock()
    if _server is not None:
        with contextlib.suppress(OSError):
            _server.control.close()
        _server.process.returncode = (
            0  # not this process's child, so nothing to wait for or warn about
        )
        _server = None


atexit.register(stop)
os.register_at_fork(after_in_child=_forget)
