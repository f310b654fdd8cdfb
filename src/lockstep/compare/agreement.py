"""Do a strategy's results agree with those of one device? A short check: three updates, the weights
afterwards.

One of the updates is on the epoch's smaller last batch. Both sides run in float64 where the model
can, since rounding is then near 1e-15 and a fault shows as 1e-3; elsewhere in the job's own number
format, where less can be told. ``lockstep verify`` answers the question at length, by the same
paired run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.compare.entries import Entry
from lockstep.compare.timed_run import in_fresh_processes
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
    """Whether the numbers are those of one device."""

    equal: bool | None  # up to rounding; None where that can't be told
    difference: float | None = None  # the largest of any parameter, as a part of how far it went
    precision: str = ""  # what both sides computed in: ``fp64``, or "" for the job's own format
    reason: str = ""  # why it can't be told
    micro_batches: int = (
        1  # in how many one device was given each batch too, where the strategy cuts it for itself
    )

    @property
    def word(self) -> str:
        """``equal``, ``differs`` or ``not known``."""
        return {True: "equal", False: "differs", None: "not known"}[self.equal]

    def __str__(self) -> str:
        return (
            self.word
            if self.difference is None
            else f"{self.word} {abs(self.difference):.0e}".replace(" 0e+00", " 0")
        )


def agreement_of(job: Job | JobFile, entry: Entry) -> Agreement:
    """Hold a row against ``single`` on one of its devices, with as many micro-batches."""
    reason = ""
    for precision in ("fp64", ""):
        settings = {"precision": precision, "compile": False} if precision else {}
        setup = replace(entry.setup, settings={**entry.setup.settings, **settings})
        try:
            difference, cut = in_fresh_processes(_apart, job, setup)
        except LockstepError as error:
            reason = first_line(error)
        else:
            return Agreement(
                difference <= _EQUAL[precision], difference, precision, micro_batches=cut
            )
    return Agreement(None, reason=reason)


def _apart(
    world: World, job: Job, strategy: Strategy, devices: tuple[Device, ...]
) -> tuple[float, int]:
    """The largest difference of any parameter or buffer after the updates, and the strategy's
    own micro-batches.
    """
    parts = strategy.num_microbatches(job)
    found = both_sides(world, Experiment(job, strategy, devices, parts, updates=UPDATES))
    apart = (
        []
        if found is None
        else [*found.updates[-1].parameters.values(), *found.updates[-1].buffers.values()]
    )
    return max(apart, default=0.0), parts if parts != job.accumulate else 1
