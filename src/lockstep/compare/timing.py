"""Alternatives timed in turns, so that a noisy machine is noisy for all of them.

::

    warm-up   A B C
    rounds    A B C   A B C   A B C   ...      one rate each; ratios are taken within a round
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
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


def in_turns(
    alternatives: Mapping[str, Callable[[], float]],
    *,
    rounds: int = 5,
    warm_up: int = 1,
    told: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time alternatives in turns: A B C, A B C, ...; each does its work once and gives its rate
    (more is faster).

    The first ``warm_up`` rounds don't count; after each of the ``rounds`` that do, ``told`` is
    called with a line.
    """
    rates: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(-warm_up, rounds):
        taken = {name: alternative() for name, alternative in alternatives.items()}
        if turn < 0:
            continue
        for name, rate in taken.items():
            rates[name].append(rate)
        if told is not None:
            told(
                f"round {turn + 1}/{rounds}: "
                + "  ".join(f"{name} {rate:,.5g}" for name, rate in taken.items())
            )
    return {name: Timing(values) for name, values in rates.items()}
