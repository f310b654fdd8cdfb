"""How often a loss is checked, so that checks take a small part of the time of a training."""

from __future__ import annotations

import math

_LARGEST_SHARE = 0.05
"""Of the time of an update, for checking its loss; beyond that it is checked every n-th update
only.
"""

_SELDOM = 1.5
"""A check that comes now and then takes so many times as long (``benchmarks loss-check``):
little of it is cached.
"""

_LARGEST_CLOSER = 0.0005
"""Likewise for looking at more samples than a local batch has."""

_WHETHER = "whether the loss is additive over samples"

TIMED = range(2, 6)
"""The updates in which the check is timed: the first one prepares much."""


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8, ...; what may change is looked at so often."""
    return number & (number - 1) == 0


class CheckInterval:
    """Chosen by the fastest check and the fastest update of those that are timed, which are among
    the slowest.

    Attributes:
        every: it is checked every so many updates.
        closer_every: as is looked at more samples than a local batch has; a multiple.
    """

    def __init__(self) -> None:
        self.every = self.closer_every = 1
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._update = math.inf
        self._times: dict[bool, list[float]] = {False: [], True: []}

    def is_due(self, update: int) -> bool:
        """Whether to check in this update, counted from 1."""
        return update < TIMED.stop or update % self.every == 0

    def is_closer(self, update: int) -> bool:
        """Whether to look at more samples, too."""
        return update < TIMED.stop or update % self.closer_every == 0

    def looks(self, update: int, *, again: bool) -> tuple[bool | None, ...]:
        """Whether to look at more samples, in each check of an update; unless None, new values have
        it done, too.

        The last one that is timed is checked twice, since a check is to be timed alone.
        """
        closer = again or self.is_closer(update)
        return (None, closer) if update == TIMED.stop - 1 else (closer,)

    def follow(self, other: CheckInterval) -> None:
        """Check as often as another one."""
        self.every, self.closer_every = other.every, other.closer_every

    def spent(self, seconds: float, *, closer: bool) -> None:
        """Note the time of a check; several threads may."""
        self._seconds[closer].append(seconds)

    def timed(self, update: int, seconds: float, replicas: int) -> str | None:
        """Choose the intervals, after an update that was timed.

        Args:
            update: its number.
            seconds: that it took, checks included.
            replicas: that checked at the same time.

        Returns:
            A line for the person, where that isn't in every update.
        """
        checks = {closer: sum(spent) / replicas for closer, spent in self._seconds.items() if spent}
        self._seconds = {False: [], True: []}
        if checks:  # else there was no sample here
            for is_closer, spent in checks.items():
                self._times[is_closer].append(spent)
            self._update = min(self._update, max(seconds - sum(checks.values()), 1e-9))
        if update < TIMED.stop - 1 or not any(self._times.values()):
            return None
        closest = min(self._times[True] or [0.0])
        check = min(self._times[False] or [closest])
        shares = check / self._update, max(closest - check, 0.0) / self._update
        self.every = (
            1 if shares[0] <= _LARGEST_SHARE else math.ceil(_SELDOM * shares[0] / _LARGEST_SHARE)
        )
        self.closer_every = self.every * max(1, math.ceil(shares[1] / _LARGEST_CLOSER / self.every))
        if self.closer_every == 1:
            return None
        check_takes, more_takes = (f"{100 * share:.1f}".removesuffix(".0") for share in shares)
        closer = f"with more samples than a local batch has in one of {self.closer_every}"
        if self.every == 1:
            often, why = f"{closer} updates only", f"that takes {more_takes} % of the time of one"
        else:
            often = f"in one of {self.every} updates, {closer}"
            why = f"a check takes {check_takes} % of the time of one, and that {more_takes} %"
        return f"{_WHETHER} is checked {often}, and as seldom in evaluations, since {why}"
