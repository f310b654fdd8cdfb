"""How often a loss is checked, so that the checks take a small part of the time of a training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

_LARGEST_SHARE = 0.05
"""The part of an update's time for checking the loss; beyond it only every n-th is checked."""

_SELDOM = 1.5
"""How many times as long a check takes that is made now and then (``benchmarks loss-check``),
since little of its data is in a cache.
"""

_SELDOMEST = 32
"""The longest interval between checks, in updates: a machine that is busy while updates are timed
makes a check seem longer.
"""

_TIMED = range(2, 6)
"""The updates in which the check is timed: the first one prepares much."""


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ...; what may change is checked in these updates."""
    return number & (number - 1) == 0


class CheckInterval:
    """Chooses how often to check, by the fastest check and the fastest update that are timed.

    The interval is a power of two, so that ranks check in the same updates though each rank chooses
    an interval of its own.

    Args:
        accelerators: the devices that are waited for in an update that is timed.

    Attributes:
        every: the interval between checks, in updates.
        is_timing: whether this update is timed.
    """

    def __init__(self, accelerators: Sequence[torch.device] = ()) -> None:
        self.every = 1
        self.is_timing = False
        self._accelerators = accelerators
        self._began = 0.0
        self._spent = 0.0
        self._check = math.inf
        self._update = math.inf

    def is_due(self, update: int) -> bool:
        """Return whether to check in this update, counted from 1."""
        return update < _TIMED.stop or update % self.every == 0

    def clock(self) -> float:
        """Read a clock in seconds, once the accelerators have done what they were given."""
        for device in self._accelerators:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def spent(self, seconds: float) -> None:
        """Note the time of a check; several threads may."""
        self._spent += seconds

    def begin_update(self, update: int) -> None:
        """Begin an update in which the loss is checked."""
        self.is_timing = update in _TIMED
        if self.is_timing:
            self._began = self.clock()

    def end_update(self, update: int, replicas: int) -> str | None:
        """Choose the interval, after an update that was timed.

        Args:
            update: the number of the update.
            replicas: how many of them checked at the same time.

        Returns:
            A note for the log, where not every update is checked.
        """
        if not self.is_timing:
            return None
        self.is_timing = False  # an evaluation may come now
        seconds = self.clock() - self._began
        check = self._spent / replicas
        self._spent = 0.0
        if check:  # else there was no sample here
            self._check = min(self._check, check)
            self._update = min(self._update, max(seconds - check, 1e-9))
        if update < _TIMED.stop - 1 or not math.isfinite(self._check):
            return None
        share = self._check / self._update
        if share <= _LARGEST_SHARE:
            return None
        while self.every < min(_SELDOMEST, _SELDOM * share / _LARGEST_SHARE):
            self.every *= 2
        return (
            f"the loss check runs in one of {self.every} updates, since a check takes "
            f"{100 * share:.0f} % of the time of an update"
        )
