"""How often a loss is checked, so that checks take a small part of the time of a training."""

from __future__ import annotations

import math

_LARGEST_SHARE = 0.05
"""Of the time of an update, for checking its loss; beyond that it is checked every n-th update only."""

TIMED = range(2, 6)
"""The updates in which the check is timed: the first one prepares much."""


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8, ...; what may change is looked at so often."""
    return number & (number - 1) == 0


class CheckInterval:
    """Chosen by the fastest check and the fastest update of those that are timed, which are among the slowest.

    Attributes:
        every: it is checked every so many updates.
    """

    def __init__(self) -> None:
        self.every = 1
        self._seconds: list[float] = []
        self._check = self._update = math.inf

    def is_due(self, update: int) -> bool:
        """Whether to check in this update, counted from 1."""
        return update < TIMED.stop or update % self.every == 0

    def spent(self, seconds: float) -> None:
        """Note the time of a check; several threads may."""
        self._seconds.append(seconds)

    def timed(self, update: int, seconds: float, replicas: int) -> str | None:
        """Choose the interval, after an update that was timed.

        Args:
            update: its number.
            seconds: that it took, checks included.
            replicas: that checked at the same time.

        Returns:
            A line for the person, where that isn't in every update.
        """
        checks = sum(self._seconds) / replicas
        self._seconds.clear()
        if checks:  # else there was no sample here
            self._check = min(self._check, checks)
            self._update = min(self._update, max(seconds - checks, 1e-9))
            self.every = math.ceil(self._check / self._update / _LARGEST_SHARE)
        if update < TIMED.stop - 1 or self.every == 1:
            return None
        return (
            f"whether the loss is additive over samples is checked in one of {self.every} updates, since a check takes "
            f"{100 * self._check / self._update:.0f} % of the time of one"
        )
