"""What the ranks of a launch are given: the function, its arguments, and the surroundings of the
caller.

All of it is in a file without a name that the caller writes once and every rank maps, however many
ranks there are and however large the arguments. The file begins with the *board*. There each rank
keeps the number of its step, which the caller still reads when the rank has died, and the caller
keeps in the last place whether the ranks are to stop::

    board: step of rank 0: 8 bytes | step of rank 1 | ... | stop || Setup, pickled | (fn, args), pickled
"""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from lockstep.launch.devices import Device
from lockstep.launch.processes.modes import Modes, switches
from lockstep.launch.processes.pickling import loads

_BOARD = 1 << 16
"""Bytes of the board: places for 8,191 ranks."""

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def _environment() -> dict[str, str]:
    """Return this process's environment; local ranks talk over the loopback interface only."""
    return {
        "THP_MEM_ALLOC_ENABLE": "1",
        **os.environ,
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
    }


@dataclass(frozen=True)
class Setup:
    """The surroundings in which the function is called.

    Attributes:
        devices: of all ranks.
        modes: the caller's.
        rendezvous: the file where the ranks meet; no other launch has it. Workers don't meet.
        folder: where the run keeps its files, or None.
        timeout: seconds after which a collective gives up.
        devices_per_rank: neighbours.
        environment, path, arguments, directory: the caller's environment variables, ``sys.path``,
            ``sys.argv`` and working directory.
        switches: the caller's settings of torch that change numbers.
    """

    devices: tuple[Device, ...]
    modes: Modes
    rendezvous: str = ""
    folder: str | None = None
    timeout: float = 1800.0
    devices_per_rank: int = 1
    environment: dict[str, str] = field(default_factory=_environment)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    arguments: list[str] = field(default_factory=lambda: list(sys.argv))
    directory: str = field(default_factory=os.getcwd)
    switches: list[tuple[Callable[[Any], None], Any]] = field(default_factory=switches)

    @property
    def groups(self) -> list[tuple[Device, ...]]:
        """The devices of each rank."""
        each = self.devices_per_rank
        return [self.devices[i : i + each] for i in range(0, len(self.devices), each)]

    def apply(self) -> None:
        """Make this process's surroundings the caller's."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.chdir(self.directory)
        importlib.invalidate_caches()
        for switch, value in self.switches:
            switch(value)
        # The person's script is not imported here: what it defines comes by value.
        sys.modules["__main__"] = types.ModuleType("__main__")


def write(setup: Setup, body: bytes) -> IO[bytes]:
    """Write a call to a new file without a name.

    Args:
        setup: the surroundings.
        body: the function and its arguments, as ``pickling`` gives them.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(bytes(_BOARD))
    file.write(pickle.dumps(setup))
    file.write(body)
    file.flush()
    return file


def mapped(file: int) -> tuple[mmap.mmap, memoryview]:
    """Map the open file of a call: the whole, and its board."""
    call = mmap.mmap(file, 0)
    return call, memoryview(call)[:_BOARD].cast("q")


def read(call: mmap.mmap) -> tuple[Setup, Callable[..., Any], tuple[Any, ...]]:
    """Enter the caller's surroundings, then load the function and its arguments."""
    call.seek(_BOARD)
    setup: Setup = pickle.load(call)
    setup.apply()
    fn, *args = loads(call.read())
    return setup, fn, tuple(args)
