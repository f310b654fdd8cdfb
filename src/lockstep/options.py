"""What several commands have among their options."""

from __future__ import annotations

from collections.abc import Callable


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that is a number above 0."""

    def number(word: str) -> float:
        if (value := kind(word)) <= 0:
            raise ValueError
        return value

    number.__name__ = "number above 0"  # what the parser calls it
    return number
