"""Noise: how far one device is from itself where its sums are taken in another order."""

from __future__ import annotations

import dataclasses

from lockstep.errors import LockstepError
from lockstep.placement import place_of
from lockstep.strategies.single import Single
from lockstep.verify.comparison import COARSE, EXACT, Bounds, Comparison
from lockstep.verify.sides import Experiment, compared

_CERTAIN = 1e-5
"""A difference in float64 of losses or gradients that no rounding makes, so that none is measured."""

_TOO_MUCH = 1e-3
"""What is no rounding in float32 either: a job that can't be repeated."""


class Noise:
    """The bounds for a job, measured when they are first needed.

    What takes float64 and gives 1e-10 or less needs no measuring. What gives more may be a model that computes in
    float32 inside, or an Adam on a gradient that is zero but for rounding.

    Args:
        experiment: the one that is to be judged.
        parts: micro-batches of a global batch on one device.
        exact: whether both sides compute in float64.
    """

    def __init__(self, experiment: Experiment, parts: int, *, exact: bool) -> None:
        self._experiment, self._parts, self._exact = experiment, parts, exact
        self.bounds = Bounds(EXACT if exact else COARSE)

    def hold(self, comparison: Comparison) -> bool:
        """Whether nothing in it is more than rounding."""
        if self.bounds.hold(comparison):
            return True
        if self.bounds.noise is not None or (self._exact and comparison.computed > _CERTAIN):
            return False
        self._measure(comparison)
        return self.bounds.hold(comparison)

    def repeats(self, twice: Comparison) -> bool:
        """Whether one device against itself, the same in all, gave the same but for sums in any order.

        What it draws may be as small as another order of sums would make it once: where that part is more than rounding
        in any format, nothing is measured, which would take the draws for noise.
        """
        return self.bounds.hold(twice) or (twice.computed <= COARSE and self.hold(twice))

    def _measure(self, comparison: Comparison) -> None:
        mixed = dataclasses.replace(
            self._experiment,
            strategy=Single(),
            devices=(place_of(self._experiment.devices),),
            settings={**self._experiment.settings, "accumulate": self._parts, "activation_checkpointing": None},
            updates=None if comparison.evaluation else len(comparison.updates),
            still=frozenset({"draws"}) if comparison.drew else frozenset(),
            shuffled=True,
        )
        try:
            bounds = Bounds(self.bounds.least, compared(mixed))
        except LockstepError:  # of a job that can't be repeated, of which more is found later
            return
        if all(bounds.typical(kind) < _TOO_MUCH for kind in ("loss", "gradients", "parameters")):
            self.bounds = bounds
