"""A short check whether a strategy's results agree with those of one device: three updates, and the
weights afterwards.

One of the updates is on the epoch's smaller last batch. Both sides run in float64 where the model
can, since rounding is then near 1e-15 and a fault shows as 1e-3; elsewhere in the job's own number
format, where less can be known. ``lockstep verify`` answers the question at length, by the same
paired run and up to the same bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.compare.fresh_processes import in_fresh_processes
from lockstep.compare.planned_rows import Entry, Setup, as_setup
from lockstep.errors import LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.strategies import Strategy, choose
from lockstep.verify.comparison import Comparison, Experiment
from lockstep.verify.experiments import Noise
from lockstep.verify.paired_run import both_sides

UPDATES = 3


@dataclass(frozen=True)
class Agreement:
    """Whether the numbers are those of one device.

    Attributes:
        equal: up to rounding; None where that isn't known.
        difference: the largest of any parameter, as a part of how far it went.
        precision: what both sides computed in: ``fp64``, or "" for the job's own format.
        reason: why it isn't known.
        micro_batches: in how many one device was given each batch, where the strategy cuts it for
            itself.
        norms_cut: whether BatchNorm normalizes over each of these micro-batches.
        without_dropout: whether dropout, whose masks differ, is left out on both sides.
    """

    equal: bool | None
    difference: float | None = None
    precision: str = ""
    reason: str = ""
    micro_batches: int = 1
    norms_cut: bool = False
    without_dropout: bool = False

    @property
    def word(self) -> str:
        """``equal``, ``differs`` or ``not known``."""
        return {True: "equal", False: "differs", None: "not known"}[self.equal]

    def __str__(self) -> str:
        if self.difference is None:
            return self.word
        return f"{self.word} {self.difference:.0e}".replace(" 0e+00", " 0")


def agreement_of(job: Job | JobFile, entry: Entry) -> Agreement:
    """Compare a row with ``single`` on one of its devices, with as many micro-batches.

    Args:
        job: the job, or its file.
        entry: the row. It is tried in the job's own format, where float64 fails.
    """
    reason = ""
    for precision in ("fp64", ""):
        setup = entry.setup
        if precision:
            setup = setup.replace(precision=precision, compile=False)
        try:
            return _agreement(with_settings(job, setup.settings), entry, precision)
        except LockstepError as error:
            reason = first_line(error)
    return Agreement(None, reason=reason)


def _agreement(job: Job | JobFile, entry: Entry, precision: str) -> Agreement:
    """Compare a row with ``single`` in one number format; as ``lockstep verify``, compare two runs
    of ``single`` where something differs by more than the bound.

    Args:
        job: with the settings of the row.
        entry: the row.
        precision: ``fp64``, or "" for the job's own format.
    """
    loaded = the_job(job)
    strategy = choose(entry.setup.strategy, entry.devices, **entry.setup.options)
    parts = strategy.num_microbatches(loaded)
    experiment = Experiment(
        job, strategy, entry.devices, parts, {"precision": loaded.precision}, updates=UPDATES
    )
    found = _compared(experiment)
    masks_differ = experiment.shares > 1 or not entry.devices[0].is_slot
    if found.drew and masks_differ:
        experiment = experiment.but(still=frozenset({"dropout"}))
        found = _compared(experiment)

    equal = Noise(_compared, experiment).hold(found)
    last = found.updates[-1]
    differences = [*last.parameters.values(), *last.buffers.values()]
    cut = parts if parts != loaded.accumulate else 1
    return Agreement(
        equal,
        max(differences, default=0.0),
        precision,
        micro_batches=cut,
        norms_cut=found.normalises and cut > 1,
        without_dropout=bool(experiment.still) and found.drops,
    )


def _compared(experiment: Experiment) -> Comparison:
    """Run an experiment in fresh processes."""
    name, options = as_setup(experiment.strategy)
    setup = Setup(name, experiment.devices, experiment.settings, options)
    found = in_fresh_processes(_on_rank, experiment.job, setup, experiment=experiment)
    assert found is not None
    return found


def _on_rank(
    world: World,
    job: Job,
    strategy: Strategy,
    devices: tuple[Device, ...],
    *,
    experiment: Experiment,
) -> Comparison | None:
    """Run an experiment, whose job is loaded here; only rank 0 has what was found."""
    return both_sides(world, experiment.but(job=job))
