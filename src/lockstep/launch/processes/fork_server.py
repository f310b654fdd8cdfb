"""The process that forks the ranks, seen from the person's process: start it, reach it, end it.

One such process serves all launches of the person's process. It takes a while to import torch,
once; a rank forked from it starts in some hundredths of a second. `lockstep.launch.processes.fork`
is what runs there.

::

    person's process ──control──> forking process ──fork──> rank 0, rank 1, ...
                     ──life of rank 0──>  (one connection for each rank)

The control connection carries the numbers of ranks to start, each with its open files. One of
those is the other end of the rank's *life*: a connection along which comes back how the rank ended
(`REPORT`), and whose closing kills the rank.

The standard library's forkserver starts processes as fast, but it leaves a folder for its socket
behind when the person's process is killed, doesn't notice that while a child of the person's
process lives on, imports the person's script, and can't end what ranks have started.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

START = struct.Struct("!I")
"""A message that starts a rank: its number."""

MOST_FILES = 32
"""Files that may be attached to a message."""

REPORT = struct.Struct("!id")
"""How a rank has ended (as ``os.waitstatus_to_exitcode`` gives it), and when, on the clock that all
processes share.
"""

NOT_STARTED = 1 << 16
"""What is reported of a rank that could not be forked: this and the system's error number."""


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket


_lock = threading.RLock()
_server: _Server | None = None


def start() -> None:
    """Start the forking process, unless it runs already; it gets ready while the caller goes on."""
    _running()


def start_rank(number: int, files: Sequence[int]) -> socket.socket:
    """Start a rank, and return its life.

    Args:
        number: the rank.
        files: the rank's open files: standard output, standard error, channel, call, and any
            others.
    """
    with _connection() as (ours, theirs):
        attached = [theirs.fileno(), *files]
        socket.send_fds(_running().control, [START.pack(number)], attached)
    return ours


def stop() -> None:
    """End the forking process, and with it all that was started through it; the next launch
    starts another.
    """
    global _server
    with _lock:
        if _server is None:
            return
        process, control = _server
        _server = None
        control.close()  # so it kills all ranks and goes
        process.terminate()  # only where it is still importing, else it doesn't listen
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _running() -> _Server:
    global _server
    with _lock:
        if _server is not None and _server.process.poll() is not None:
            stop()
        if _server is not None:
            return _server
        with _connection() as (ours, theirs):
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


@contextlib.contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Make a connection to send its second end away: that one is closed here afterwards, and the
    first one too if sending fails.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            yield ours, theirs
        except BaseException:
            ours.close()
            raise


_PROGRAM = (
    "import sys; from lockstep.launch.processes import fork; "
    "fork.main(int(sys.argv[1]), int(sys.argv[2]))"
)


def _environment() -> dict[str, str]:
    """Return the environment, with an import path by which both find the same modules."""
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    path.append(str(Path(__file__).resolve().parents[3]))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # Looking for CUDA devices must not initialise CUDA: forked ranks could no longer use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


atexit.register(stop)
