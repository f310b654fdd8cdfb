"""The stopwatch: alternatives timed in turns, so that a noisy machine is noisy for all of them.

::

    warm-up   A B C
    rounds    A B C   A B C   A B C   ...      one rate each; ratios are taken within a round
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The rates of one alternative, in its own unit (samples per second, say)."""

    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle rate."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest rate."""
        return min(self.rates), max(self.rates)

    def __str__(self) -> str:
        return f"{self.median:,.5g} ({self.spread[0]:,.5g} to {self.spread[1]:,.5g})"


@dataclass(frozen=True)
class Timings:
    """The rates of all alternatives, round by round."""

    by_name: dict[str, Timing]

    def ratio(self, name: str, to: str) -> Timing:
        """How many times the rate of ``to`` that of ``name`` is: a ratio from each round, so that drift cancels."""
        pairs = zip(self.by_name[name].rates, self.by_name[to].rates, strict=True)
        return Timing(tuple(a / b for a, b in pairs))


def in_turns(
    alternatives: Mapping[str, Callable[[], float]],
    *,
    rounds: int = 5,
    warm_up: int = 1,
    told: Callable[[str], None] | None = None,
) -> Timings:
    """Time alternatives in turns: A B C, A B C, ...

    Args:
        alternatives: by name, a function that does its work once and gives its rate (more is faster).
        rounds: how many rates to take of each.
        warm_up: rounds before these that don't count.
        told: called with a line after each round.
    """
    rates: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(-warm_up, rounds):
        taken = {name: alternative() for name, alternative in alternatives.items()}
        if turn < 0:
            continue
        for name, rate in taken.items():
            rates[name].append(rate)
        if told is not None:
            told(f"round {turn + 1}/{rounds}: " + "  ".join(f"{name} {rate:,.5g}" for name, rate in taken.items()))
    return Timings({name: Timing(tuple(values)) for name, values in rates.items()})
