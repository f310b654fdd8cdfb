"""A short check whether a strategy's results agree with those of one device: three updates, and the
weights afterwards.

One of the updates is on the epoch's smaller last batch. Both sides run in float64 where the model
can, since rounding is then near 1e-15 and a fault shows as 1e-3; elsewhere in the job's own number
format, where less can be known. ``lockstep verify`` answers the question at length, by the same
paired run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.compare.fresh_processes import in_fresh_processes
from lockstep.compare.planned_rows import Entry
from lockstep.errors import LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.strategies import Strategy
from lockstep.verify.comparison import Experiment
from lockstep.verify.paired_run import both_sides

UPDATES = 3

_EQUAL = {"fp64": 1e-9, "": 1e-4}
"""The largest difference that rounding makes in a few updates, in float64 and in other formats."""


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
    """

    equal: bool | None
    difference: float | None = None
    precision: str = ""
    reason: str = ""
    micro_batches: int = 1

    @property
    def word(self) -> str:
        """``equal``, ``differs`` or ``not known``."""
        return {True: "equal", False: "differs", None: "not known"}[self.equal]

    def __str__(self) -> str:
        if self.difference is None:
            return self.word
        return f"{self.word} {abs(self.difference):.0e}".replace(" 0e+00", " 0")


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
            difference, cut = in_fresh_processes(_apart, job, setup)
        except LockstepError as error:
            reason = first_line(error)
        else:
            equal = difference <= _EQUAL[precision]
            return Agreement(equal, difference, precision, micro_batches=cut)
    return Agreement(None, reason=reason)


def _apart(
    world: World,
    job: Job,
    strategy: Strategy,
    devices: tuple[Device, ...],
) -> tuple[float, int]:
    """Return the largest difference of any parameter or buffer after the updates, and the
    strategy's own micro-batches.
    """
    parts = strategy.num_microbatches(job)
    found = both_sides(world, Experiment(job, strategy, devices, parts, updates=UPDATES))
    cut = parts if parts != job.accumulate else 1
    if found is None:
        return 0.0, cut
    last = found.updates[-1]
    differences = [*last.parameters.values(), *last.buffers.values()]
    return max(differences, default=0.0), cut
