"""What the ranks of a launch are given: the function, its arguments, and the surroundings of the
caller.

All of it is in a file without a name that the caller writes once and every rank maps, however many
ranks there are and however large the arguments. The file begins with the *board*. There each rank
keeps the number of its step, which the caller still reads when the rank has died, and the caller
keeps whether the ranks are to stop::

    ranks: 8 bytes | step of rank 0: 8 bytes | step of rank 1 | ... | stop | Setup, pickled | (fn, args), pickled
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

from lockstep.launch.devices import Device, usable_cores
from lockstep.launch.processes.modes import Modes, set_switches, switches
from lockstep.launch.processes.pickling import loads

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
        rendezvous: the file where the ranks meet; no other launch has it. None for workers, which
            don't meet.
        folder: where the run keeps its files, or None.
        timeout: seconds after which a collective gives up.
        devices_per_rank: neighbours.
        environment, path, arguments, directory, cores: the caller's environment variables,
            ``sys.path``, ``sys.argv``, working directory and affinity.
        switches: the caller's settings of torch that change numbers.
    """

    devices: tuple[Device, ...]
    modes: Modes
    rendezvous: str | None = None
    folder: str | None = None
    timeout: float = 1800.0
    devices_per_rank: int = 1
    environment: dict[str, str] = field(default_factory=_environment)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    arguments: list[str] = field(default_factory=lambda: list(sys.argv))
    directory: str = field(default_factory=os.getcwd)
    cores: tuple[int, ...] = field(default_factory=usable_cores)
    switches: dict[str, Any] = field(default_factory=switches)

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
        if hasattr(os, "sched_setaffinity") and usable_cores() != self.cores:
            os.sched_setaffinity(0, self.cores)
        importlib.invalidate_caches()
        set_switches(self.switches)
        # The person's script is not imported here: what it defines comes by value.
        sys.modules["__main__"] = types.ModuleType("__main__")


def write(setup: Setup, body: bytes) -> IO[bytes]:
    """Write a call to a new file without a name.

    Args:
        setup: the surroundings.
        body: the function and its arguments, as ``pickling`` gives them.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115
    size = len(setup.groups)
    file.write(size.to_bytes(8, sys.byteorder))
    file.write(bytes(8 * (size + 1)))
    file.write(pickle.dumps(setup))
    file.write(body)
    file.flush()
    return file


class Call:
    """A call as read from its file, by a rank or, for the board, by the caller."""

    def __init__(self, number: int) -> None:
        self._map = mmap.mmap(number, 0)
        self.size = int.from_bytes(self._map[:8], sys.byteorder)
        self.board = memoryview(self._map)[8 : 16 + 8 * self.size].cast("q")

    def read(self) -> tuple[Callable[..., Any], tuple[Any, ...], Setup]:
        """Enter the caller's surroundings, then load the function and its arguments."""
        self._map.seek(16 + 8 * self.size)
        setup: Setup = pickle.load(self._map)
        setup.apply()
        fn, args = loads(self._map.read())
        return fn, args, setup
