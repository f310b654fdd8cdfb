"""Noise: how far one device is from itself where its sums are taken in another order."""

from __future__ import annotations

from lockstep.errors import LockstepError
from lockstep.verify.comparison import COARSE, EXACT, Bounds, Comparison, Experiment
from lockstep.verify.determinism import Thing
from lockstep.verify.experiments import Laboratory

_CERTAIN = 1e-5
"""A difference in float64 of losses or gradients that no rounding makes, so that none is measured."""

_TOO_MUCH = 1e-3
"""What is no rounding in float32 either: a job that can't be repeated."""

_FEWEST, _FEWEST_OF_OPTIMIZERS = 5, 3
"""Updates that are measured at least: a loss in float32 comes out the same to the bit by chance, once. What an
optimizer makes of gradients that agree (Adam of one that is zero: a sign by chance) shows sooner: it has many."""


class Noise:
    """The bounds for a job, measured when they are first needed.

    What takes float64 and gives 1e-10 or less needs no measuring. What gives more may be a model that computes in
    float32 inside, or an Adam on a gradient that is zero but for rounding.

    It is measured with the same things taken out of the model as in the comparison that is judged: a bias before a
    batch norm has the gradient zero only while that normalises. Of what draws, the draws are always out, since they
    would fall on other samples once these are mixed.

    Args:
        laboratory: where it is measured.
        experiment: the one that is to be judged.
    """

    def __init__(self, laboratory: Laboratory, experiment: Experiment) -> None:
        self._laboratory, self._experiment = laboratory, experiment
        self._exact = experiment.settings["precision"] == "fp64"
        self._least = Bounds(EXACT if self._exact else COARSE)
        self._measured: dict[frozenset[Thing], Bounds] = {}

    @property
    def least(self) -> float:
        """Up to where any difference is rounding."""
        return self._least.least

    def bounds(self, comparison: Comparison) -> Bounds:
        """Those of a comparison, as far as they have been measured."""
        return self._measured.get(_out_of(comparison), self._least)

    def hold(self, comparison: Comparison) -> bool:
        """Whether nothing in it is more than rounding."""
        if self.bounds(comparison).hold(comparison):
            return True
        things = _out_of(comparison)
        if things in self._measured or (self._exact and comparison.computed > _CERTAIN):
            return False
        self._measured[things] = self._measure(comparison, things)
        return self._measured[things].hold(comparison)

    def repeats(self, twice: Comparison) -> bool:
        """Whether one device against itself, the same in all, gave the same but for sums in any order.

        What it draws may be as small as another order of sums would make it once: where that part is more than rounding
        in any format, nothing is measured, which would take the draws for noise.
        """
        return self.bounds(twice).hold(twice) or (twice.computed <= COARSE and self.hold(twice))

    def _measure(self, comparison: Comparison, things: frozenset[Thing]) -> Bounds:
        fewest = _FEWEST if comparison.computed > self._least.least else _FEWEST_OF_OPTIMIZERS
        mixed = self._experiment.of_single(
            settings={**self._experiment.settings, "activation_checkpointing": None},
            updates=None if comparison.evaluation else max(fewest, len(comparison.updates)),
            still=things,
            shuffled=True,
        )
        try:
            bounds = Bounds(self._least.least, self._laboratory.compared(mixed))
        except LockstepError:  # of a job that can't be repeated, of which more is found later
            return self._least
        fits = all(bounds.typical(kind) < _TOO_MUCH for kind in ("loss", "gradients", "parameters"))
        return bounds if fits else self._least


def _out_of(comparison: Comparison) -> frozenset[Thing]:
    """What has to be out of the model where its noise is measured."""
    return frozenset((*comparison.still, "draws")) if comparison.drew else frozenset(comparison.still)
