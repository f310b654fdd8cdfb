"""Fitting: the largest batch for which a step fits in the memory of every device.

::

    batch   1  2  4  ...  doubled while it fits    ──▶ fits ─────── first that doesn't
                                                          then halved between the two

An accelerator raises an error of its own where its memory is not enough. Slots share the memory of
one machine, so each is given a number of bytes. Where there is such a budget the live bytes of each
device are counted (`benchmarks.live_memory`).
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable

import torch

from benchmarks.device_load import peaks_of
from lockstep.errors import InputError, OutOfMemory
from lockstep.launch.devices import Devices, parse


def largest_batch(
    step: Callable[[int], object],
    devices: Devices = None,
    budget: int | None = None,
    *,
    multiple: int = 1,
    limit: int = 1 << 20,
) -> int:
    """Find the largest batch that fits.

    ``step`` is called some twenty times, with batches up to twice the one that is found. More
    samples are held to need more memory. What the calling thread makes counts for the first
    device.

    Args:
        step: is called with a number of samples, and makes an update on a batch of this size, or
            whatever is to fit. What it changes stays changed.
        devices: those that it computes on, as ``lockstep.launch.devices.parse`` reads them, or a
            list.
        budget: bytes that a step may make on each device, beyond what was there before. None is
            what an accelerator has left.
        multiple: only multiples of this are tried.
        limit: and none above this.

    Returns:
        The number of samples; 0 where not even ``multiple`` fits.

    Raises:
        InputError: a budget or a multiple below 1, or CPU devices without a budget.
        DeviceError: devices that don't exist.

    Example::

        def step(batch: int) -> None:
            loss_of(net(torch.randn(batch, 512)), torch.randint(1000, (batch,))).backward()

        largest_batch(step, "2xcpu", budget=400_000_000)
    """
    places = tuple(dict.fromkeys(parse(devices)))
    if multiple < 1 or (budget is not None and budget < 1):
        raise InputError(f"multiple {multiple}, budget {budget}: both are at least 1")
    if budget is None and any(place.is_slot for place in places):
        raise InputError(
            f"{places[0]} can't say when it is full: give a budget, in bytes for each device"
        )

    def measured(batch: int) -> bool:
        if budget is not None:
            peaks = peaks_of(lambda: step(batch), places)
            return max(peaks.values()) <= budget
        step(batch)
        torch.accelerator.synchronize()
        return True

    def fits(count: int) -> bool:
        try:
            return measured(count * multiple)
        except (torch.OutOfMemoryError, OutOfMemory):
            return False
        finally:
            if not any(place.is_slot for place in places):
                gc.collect()  # what a failed step has left
                torch.accelerator.empty_cache()

    if budget is not None:
        fits(1)  # what only a first step makes isn't counted
    return multiple * _last(fits, limit // multiple)


def _last(fits: Callable[[int], bool], limit: int) -> int:
    """Return the last number from 1 to ``limit`` that fits, 0 where none does."""
    known, wrong = 0, 1
    while wrong <= limit and fits(wrong):
        known, wrong = wrong, 2 * wrong
    between = range(known + 1, min(wrong, limit + 1))
    return known + bisect.bisect(between, False, key=lambda count: not fits(count))
