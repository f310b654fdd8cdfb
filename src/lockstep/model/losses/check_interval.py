"""How often a loss is checked, so that the checks take a small part of the time of a training."""

from __future__ import annotations

import math

_LARGEST_SHARE = 0.05
"""The part of an update's time for checking the loss; beyond it only every n-th is checked."""

_SELDOM = 1.5
"""How many times as long a check takes that is made now and then (``benchmarks loss-check``),
since little of its data is in a cache.
"""

_SELDOMEST = 32
"""The loss is checked at least in every so many updates: a machine that is busy while they are
timed makes a check seem longer.
"""

TIMED = range(2, 6)
"""The updates in which the check is timed: the first one prepares much."""


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8, ...; what may change is checked so often."""
    return number & (number - 1) == 0


class CheckInterval:
    """Chooses how often to check, by the fastest check and the fastest update that are timed.

    Attributes:
        every: the loss is checked in every so many updates.
    """

    def __init__(self) -> None:
        self.every = 1
        self._spent = 0.0
        self._check = math.inf
        self._update = math.inf

    def is_due(self, update: int) -> bool:
        """Whether to check in this update, counted from 1."""
        return update < TIMED.stop or update % self.every == 0

    def spent(self, seconds: float) -> None:
        """Note the time of a check; several threads may."""
        self._spent += seconds

    def timed(self, update: int, seconds: float, replicas: int) -> str | None:
        """Choose the interval, after an update that was timed.

        Args:
            update: the number of the update.
            seconds: the time of the update, checks included.
            replicas: how many of them checked at the same time.

        Returns:
            A note for the log, where not every update is checked.
        """
        check = self._spent / replicas
        self._spent = 0.0
        if check:  # else there was no sample here
            self._check = min(self._check, check)
            self._update = min(self._update, max(seconds - check, 1e-9))
        if update < TIMED.stop - 1 or not math.isfinite(self._check):
            return None
        share = self._check / self._update
        if share <= _LARGEST_SHARE:
            return None
        self.every = min(_SELDOMEST, math.ceil(_SELDOM * share / _LARGEST_SHARE))
        return (
            f"whether the loss is additive over samples is checked in one of {self.every} updates, "
            f"since a check takes {100 * share:.0f} % of the time of one"
        )
