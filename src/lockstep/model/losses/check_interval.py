"""How often a loss is checked, and how closely, so that checks take a small part of the time of a training."""

from __future__ import annotations

import math
from typing import Any

from lockstep.tensors.pytree import has_rows, tensors

_LARGEST_SHARE = 0.05
"""Of the time of an update, for checking its loss; beyond that it is checked every n-th update only."""

_VALUES = 10_000
"""Of targets, up to which new ones are looked at: more are no classes."""

_ELEMENTS = 4096
"""Of a tensor, up to which each column has values of its own."""

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
        self._values: dict[int, set[tuple[int, Any]]] = {}
        self._check = self._update = math.inf

    def is_due(self, update: int) -> bool:
        """Whether to check in this update, counted from 1."""
        return update < TIMED.stop or update % self.every == 0

    def is_close(self, step: int, nest: Any, samples: int, *, waits: bool) -> bool:
        """Whether to look at more samples than a local batch has, too: in updates 1, 2, 4, 8, ... and in evaluations.

        Also where targets, or whole numbers among outputs, have a value that none had there before (a class, a flag),
        on devices that are waited for.
        """
        is_new = waits and self._has_new_value(nest, samples)
        return is_new or not step or is_power_of_two(step)

    def _has_new_value(self, nest: Any, samples: int) -> bool:
        outputs, targets = nest
        flags = [t for t in tensors(outputs) if not t.is_floating_point() or t.numel() == samples]
        is_new = False
        for place, tensor in enumerate((*flags, *tensors(targets))):
            seen = self._values.setdefault(place, set())
            if has_rows(tensor, samples) and tensor.numel() and len(seen) <= _VALUES:
                now = _values_in(tensor, samples)
                is_new |= not now <= seen
                seen |= now
        return is_new

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


def _values_in(tensor: Any, samples: int) -> set[tuple[int, Any]]:
    """Whole numbers, and NaN as None, by their column."""
    if tensor.is_complex() or (tensor.numel() > _ELEMENTS and tensor.is_floating_point()):
        return set()
    if tensor.numel() > _ELEMENTS:
        return {(0, value) for value in tensor.unique().tolist()}
    rows = tensor.reshape(samples, -1).tolist()
    values = ((column, value) for row in rows for column, value in enumerate(row))
    return {(column, v if v == v else None) for column, v in values if v != v or v % 1 == 0}
