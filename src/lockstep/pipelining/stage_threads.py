"""StageThreads: threads that compute on the cores, or the accelerator, of the stage whose turn they
have.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.launch.cores import limit_threads
from lockstep.launch.devices import Device, usable_cores
from lockstep.threads.thread_pool import run

T = TypeVar("T")

_here = threading.local()


class StageThreads:
    """A thread for each micro-batch, which goes from stage to stage.

    Args:
        devices: of the process.
        stages: the device of each stage.
    """

    def __init__(self, devices: Sequence[Device], stages: Sequence[Device]) -> None:
        self._devices = devices
        self._stages = stages

    def run(
        self,
        functions: Sequence[Callable[[], T]],
        on_abort: Sequence[Callable[[], None]] = (),
    ) -> list[T]:
        """Call functions at the same time, each in a thread.

        Args:
            functions: return something that isn't None.
            on_abort: called as soon as one has failed, to free the others.
        """
        places = [self._devices[0]] * len(functions)
        if places[0].is_slot:
            # Bound to no core yet: each goes to those of its stage.
            places = [Device("cpu", i) for i in range(len(functions))]
        try:
            found = run(places, functions, role="", on_abort=on_abort)
        finally:
            if any(device.threads > 1 for device in self._stages):
                # A thread's limit is also that of all new ones.
                torch.set_num_threads(torch.get_num_threads())
        return [result for result in found if result is not None]

    def occupy(self, stage: int) -> None:
        """Compute on a stage's device from now on, in the calling thread."""
        device = self._stages[stage]
        if not device.is_slot:
            torch.accelerator.set_device_index(device.index)
            return
        before: tuple[int, ...] = getattr(_here, "cores", ())
        if device.cores == before:
            return
        _here.cores = device.cores
        if max(1, len(before)) != device.threads:
            limit_threads(device)
        if len(device.cores) == 1:
            _set_cores(0, device.cores)
        elif len(before) == 1:
            _set_cores(0, usable_cores())

    def beckon(self, thread: int, place: int) -> None:
        """Let a thread that sleeps wake up on the core where it will compute.

        Where it was pinned before another may compute, which would keep it from going where it is
        waited for.

        Args:
            thread: the number that the system has for it.
            place: of a device of the process.
        """
        cores = self._devices[place].cores
        if len(cores) == 1:
            _set_cores(thread, cores)


def _set_cores(thread: int, cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)
