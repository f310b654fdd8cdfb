"""Laboratory: where experiments run, one after another; and noise: how far one device is from
itself there.

What experiments have in common is made once: the processes, what the person's job imports there,
and its data.
"""

from __future__ import annotations

from typing import Any

from lockstep.data import is_stream, resolve
from lockstep.errors import LockstepError
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.processes.local_ranks import StandingRanks
from lockstep.launch.world import World
from lockstep.strategies import Strategy
from lockstep.verify.comparison import COARSE, EXACT, Bounds, Comparison, Experiment
from lockstep.verify.determinism import Thing
from lockstep.verify.paired_run import both_sides


class Laboratory:
    """Where experiments run: in this process, or on ranks that stay for the next where the strategy
    wants several.

    Those start as soon as it is entered.
    """

    def __init__(self, strategy: Strategy, devices: tuple[Device, ...]) -> None:
        self._ranks = StandingRanks(devices, strategy.devices_per_rank)
        self._wanted = not needs_one_process(strategy, devices)

    def __enter__(self) -> Laboratory:
        if self._wanted:
            self._ranks.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._ranks.close()

    def compared(self, experiment: Experiment) -> Comparison:
        """Run an experiment.

        Raises:
            LockstepError: the strategy refuses the job, or a rank fails.
            Exception: what the job's own code raises in this process.
        """
        if needs_one_process(experiment.strategy, experiment.devices):
            with alone(experiment.devices) as world:
                found = _on_rank(world, experiment)
        else:
            assert experiment.devices == self._ranks.devices
            found = self._ranks.call(_on_rank, experiment)
        assert found is not None
        return found


def _on_rank(world: World, experiment: Experiment) -> Comparison | None:
    return both_sides(world, experiment, _with_data_of_before(world, experiment))


_data: tuple[Any, Any] | None = None
"""Of the last experiment on these ranks: what it was made from, and the training data."""

_OURS = ("sync_batchnorm", "activation_checkpointing")
"""Settings that experiments change, and that no data depend on."""


def _with_data_of_before(world: World, experiment: Experiment) -> Job:
    """The job with the data that an experiment before this one has made on these ranks: they may
    take long to make.

    A stream is made anew; and so is all in the person's own process, where data that can't be made
    twice are looked for. (A job that isn't a file comes with its data each time.)
    """
    global _data
    job = experiment.loaded
    if world.size == 1 or not isinstance(experiment.job, JobFile):
        return job
    settings = {name: value for name, value in experiment.settings.items() if name not in _OURS}
    if _data is None or _data[0] != (experiment.job, settings):
        _data = (experiment.job, settings), resolve(job.train_data, world, "train_data")
    return job if is_stream(_data[1]) else job.replace(train_data=_data[1])


_CERTAIN = 1e-5
"""A difference in float64 of losses or gradients that no rounding makes, so that none is
measured.
"""

_TOO_MUCH = 1e-3
"""What is no rounding in float32 either: a job that can't be repeated."""

_FEWEST, _FEWEST_OF_OPTIMIZERS = 5, 3
"""Updates that are measured at least: a loss in float32 comes out the same to the bit by chance,
once. What an optimizer makes of gradients that agree (Adam of one that is zero: a sign by chance)
shows sooner: it has many.
"""


class Noise:
    """The bounds for a job, measured when they are first needed.

    Noise is what one device differs by from itself where its sums are taken in another order. What
    takes float64 and gives 1e-10 or less needs no measuring. What gives more may be a model that
    computes in float32 inside, or an Adam on a gradient that is zero but for rounding.

    It is measured with the same things taken out of the model as in the comparison that is judged:
    a bias before a batch norm has the gradient zero only while that normalises. Of what draws, the
    draws are always out, since they would fall on other samples once these are mixed.
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
        first = self._least.first_apart(
            comparison
        )  # of which an optimizer may make much in the next ones
        computed = comparison.computed if first is None else first.computed
        if things in self._measured or (self._exact and computed > _CERTAIN):
            return False
        self._measured[things] = self._measure(comparison, things)
        return self._measured[things].hold(comparison)

    def repeats(self, twice: Comparison) -> bool:
        """Whether one device against itself, the same in all, gave the same but for sums in any
        order.

        What it draws may be as small as another order of sums would make it once: where that part
        is more than rounding in any format, nothing is measured, which would take the draws for
        noise.
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
    return (
        frozenset((*comparison.still, "draws")) if comparison.drew else frozenset(comparison.still)
    )
