"""The rates of one alternative, turn by turn, and the rate of one turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The rates of one alternative, round by round, in its own unit (samples per second, say)."""

    rates: Sequence[float]

    @property
    def median(self) -> float:
        """The middle rate."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest rate."""
        return min(self.rates), max(self.rates)

    def over(self, other: Timing) -> Timing:
        """Return the ratio of this rate to another one in each round, so that drift cancels."""
        return Timing([mine / its for mine, its in zip(self.rates, other.rates, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:,.5g} ({self.spread[0]:,.5g} to {self.spread[1]:,.5g})"


def rate_of(timed: Callable[[int], tuple[float, int]], seconds: float) -> float:
    """Return the samples per second of 2, 4, 8, ... updates, as soon as these take ``seconds``.

    ``timed`` makes a number of updates, and gives the seconds and the samples.
    """
    count, elapsed, samples = 1, 0.0, 0
    while elapsed < seconds:
        count *= 2
        elapsed, samples = timed(count)
    return samples / elapsed
