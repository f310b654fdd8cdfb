"""Where experiments run; and noise: how far one device is from itself there."""

from __future__ import annotations

from lockstep.errors import LockstepError
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.processes import local_ranks
from lockstep.launch.world import not_within_a_rank
from lockstep.verify.comparison import COARSE, EXACT, Bounds, Comparison, Experiment
from lockstep.verify.determinism import Thing
from lockstep.verify.paired_run import both_sides


def compared(experiment: Experiment) -> Comparison:
    """Run an experiment: in this process, or on ranks of its own.

    Raises:
        LockstepError: the strategy refuses the job, or a rank fails.
        Exception: what the job's own code raises in this process.
    """
    if needs_one_process(experiment.strategy, experiment.devices):
        with alone(experiment.devices) as world:
            found = both_sides(world, experiment)
    else:
        not_within_a_rank()
        found = local_ranks.run(
            both_sides,
            experiment.devices,
            (experiment,),
            on_output=lambda text, stream: None,
            devices_per_rank=experiment.strategy.devices_per_rank,
        )[0]
    assert found is not None
    return found


_CERTAIN = 1e-5
"""A difference in float64 of losses or gradients that no rounding makes: no noise is measured."""

_TOO_MUCH = 1e-3
"""What is no rounding in float32 either: a job that can't be repeated."""

_FEWEST = 5
"""Updates that are measured at least: a loss in float32 may come out the same by chance, once."""


class Noise:
    """The bounds for a job, measured when they are first needed.

    Noise is what one device differs by from itself where its sums are taken in another order. In
    float64 a difference up to 1e-10 needs no measuring. A larger one may come from a model that
    computes in float32 inside, or from Adam on a gradient that is zero but for rounding.

    The same things are taken out of the model as in the comparison that is judged: a bias before a
    batch norm has the gradient zero only while that normalises. Draws are always taken out, since
    they would fall on other samples once these are mixed.

    Args:
        experiment: the strategy against one device; its number format sets the least bound.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._exact = experiment.settings["precision"] == "fp64"
        self._least = Bounds(EXACT if self._exact else COARSE)
        self._measured: dict[frozenset[Thing], Bounds] = {}

    @property
    def least(self) -> float:
        """Return up to where any difference is rounding."""
        return self._least.least

    def bounds(self, comparison: Comparison) -> Bounds:
        """Return the bounds of a comparison, as far as they have been measured."""
        things = _out_of(comparison)
        return self._measured.get(things, self._least)

    def hold(self, comparison: Comparison) -> bool:
        """Return whether no difference in a comparison is more than rounding."""
        if self.bounds(comparison).hold(comparison):
            return True

        things = _out_of(comparison)
        if things in self._measured or self._is_certain(comparison):
            return False
        self._measured[things] = self._measure(comparison, things)
        return self._measured[things].hold(comparison)

    def _is_certain(self, comparison: Comparison) -> bool:
        """Return whether sides differ by more than any rounding in float64."""
        # An optimizer may make much of the first difference in later updates.
        first = self._least.first_apart(comparison)
        computed = comparison.computed if first is None else first.worst("loss", "gradients")
        return self._exact and computed > _CERTAIN

    def repeats(self, twice: Comparison) -> bool:
        """Return whether one device against itself gave the same but for sums in any order.

        Where losses or gradients differ by more than rounding in any format, nothing is measured: a
        measurement would take what the model draws for noise.
        """
        if twice.computed > COARSE:
            return self.bounds(twice).hold(twice)
        return self.hold(twice)

    def _measure(self, comparison: Comparison, things: frozenset[Thing]) -> Bounds:
        """Compare one device with itself, its sums taken in another order."""
        updates = None
        if not comparison.evaluation:
            updates = max(_FEWEST, len(comparison.updates))
        mixed = self._experiment.of_single(updates=updates, still=things, shuffled=True)
        try:
            noise = compared(mixed)
        except LockstepError:  # of a job that can't be repeated, which is found later
            return self._least

        if noise.worst_of("loss", "gradients") > _TOO_MUCH:
            return self._least
        return Bounds(self.least, noise)


def _out_of(comparison: Comparison) -> frozenset[Thing]:
    """Return what has to be out of the model where its noise is measured."""
    things = frozenset(comparison.still)
    if comparison.drew:
        things |= {"draws"}
    return things
