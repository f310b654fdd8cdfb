"""Where a worker works: a process like a rank's, but in no process group. It takes tasks until it is told to end.

::

    caller ──tasks (a pipe)──> worker ──events──> caller        heads only, a few kilobytes at most
           <──blocks (files without a name, in memory)──>       what is large

See `lockstep.launch.processes.task_workers` for the other end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.world import World

_here: Station | None = None


class Station:
    """What a worker has to do with.

    Attributes:
        number: the worker's, from 0.
        device: the worker's own.
        tell: sends an event to the caller.
        blocks: files that the caller has open too.
    """

    def __init__(
        self, number: int, device: Device, board: memoryview, tell: Callable[[Any], None], tasks: int, *blocks: int
    ) -> None:
        self.number = number
        self.device = device
        self.tell = tell
        self.blocks = blocks
        self._board = board
        self._tasks = open(tasks, "rb")  # noqa: SIM115

    def next(self) -> bytes:
        """The head of the next task, as soon as there is one; empty at the end."""
        length = int.from_bytes(self._tasks.read(4), "little")
        return self._tasks.read(length)

    @property
    def item(self) -> int:
        """The item that it is at, from 0; -1 between two. The caller sees it even when the worker has died."""
        return int(self._board[self.number]) - 1

    @item.setter
    def item(self, index: int) -> None:
        self._board[self.number] = index + 1


def current() -> Station | None:
    """That of this process, where it is a worker."""
    return _here


def work(fn: Callable[..., Any], args: tuple[Any, ...], station: Station) -> None:
    """Call ``fn(station, *args)`` on the worker's device."""
    global _here
    device = station.device
    # It isn't pinned to the cores of its slot, as ranks are: it has no equals to be in step with, and the caller, whose
    # thread also computes, takes now the one core and now the other.
    _devices.limit_threads(device)
    if not device.is_slot:
        torch.accelerator.set_device_index(device.index)
    _world.enter(World(devices=(device,)))
    _here = station
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # it is alone, whatever its caller is
        os.environ.pop(name, None)
    fn(station, *args)
