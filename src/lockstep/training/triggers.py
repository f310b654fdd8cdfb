"""When a training evaluates, saves and logs: after so many steps or epochs, or after a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.world import World
from lockstep.settings import Every
from lockstep.training.shared_clock import SharedClock

LOG = "log"
EVALUATE = "eval"
SAVE = "save"
"""Each of the three with ``_every`` is a setting's name."""


class Triggers:
    """What is due after a step, alike on every rank.

    Each rank counts steps and epochs; a part of an epoch is due at the step that completes it. For
    times all ranks go by rank 0's clock.

    Args:
        job: has the settings.
        world: this rank's.
        batches_of: the number of batches of an epoch (from 0); None for a stream.
        together: whether the ranks meet in each update.

    Raises:
        JobError: a part of an epoch is asked for, and the data are a stream.
    """

    def __init__(
        self, job: Job, world: World, batches_of: Callable[[int], int | None], *, together: bool
    ) -> None:
        self._world = world
        self._batches_of = batches_of
        self._together = together
        self._every = {
            LOG: Every.read(job.log_every, "log_every"),
            EVALUATE: Every.read(job.eval_every, "eval_every"),
            SAVE: Every.read(job.save_every, "save_every"),
        }

        self._steps: dict[str, int] = {}
        self._epochs: dict[str, Fraction] = {}
        seconds: dict[str, float] = {}

        for what, every in self._every.items():
            if not together and what != LOG:
                continue  # ranks that don't meet would meet in other collectives at the same time
            if every.steps is not None:
                self._steps[what] = every.steps
            elif every.seconds is not None:
                seconds[what] = every.seconds
            elif every.epochs is not None and every.is_within:
                self._epochs[what] = every.epochs

        if self._epochs and batches_of(0) is None:
            name = f"{next(iter(self._epochs))}_every"
            raise JobError(
                f"{name}: {getattr(job, name)!r} is a part of an epoch, and a stream has no "
                "length that is known: give steps (100) or a time (10min)"
            )

        # Rank 0 logs by itself, unless functions see the log that may stop the training.
        of_log: dict[str, float] = {}
        if LOG in seconds and not (together and (job.on_event or job.callbacks)):
            of_log[LOG] = seconds.pop(LOG)
        self._clocks = [
            SharedClock(world, seconds, together=True),
            SharedClock(world, of_log, together=False),
        ]

    def notes(self) -> Iterator[str]:
        """Yield what a person has to know of the settings, where ranks don't meet in each update."""
        if self._together:
            return

        for what, every in self._every.items():
            if not every.is_within:
                continue
            if what == LOG:
                yield (
                    "log_every: these ranks don't meet in a step, so that the losses within an "
                    "epoch are rank 0's"
                )
            else:
                does = "evaluate" if what == EVALUATE else "save"
                yield (
                    f"{what}_every: these ranks meet at the end of an epoch only, and {does} there"
                )

    def after_step(self, epoch: int, position: int) -> frozenset[str]:
        """Return what is due after this step, but for what the end of an epoch makes due.

        Args:
            epoch: completed epochs.
            position: completed batches of the next one.
        """
        step = self._world.step
        due: frozenset[str] = frozenset()
        for what, steps in self._steps.items():
            if step % steps == 0:
                due |= {what}
        if self._epochs:
            due |= self._parts_of_epochs(epoch, position)
        for clock in self._clocks:
            due |= clock.over()
        return due

    def _parts_of_epochs(self, epoch: int, position: int) -> set[str]:
        """Return what is due since this step has completed a part of an epoch."""
        batches = self._batches_of(epoch)
        assert batches is not None
        now = epoch + Fraction(position, batches)
        before = epoch + Fraction(position - 1, batches)
        due = set()
        for what, part in self._epochs.items():
            if now // part > before // part:
                due.add(what)
        return due

    def at_end(self, what: str, epoch: int) -> bool:
        """Return whether the end of an epoch (from 1) alone makes something due."""
        every = self._every[what]
        if every.epochs is None or every.is_within:
            return what != EVALUATE or not self._together
        return epoch % every.epochs == 0

    def evaluates_at_end(self, epoch: int, sets: Mapping[str, Any]) -> bool:
        """Return whether callbacks are called for an evaluation at the end of an epoch (from 1).

        Without evaluation ``sets`` where the epoch is logged.
        """
        return self.at_end(EVALUATE, epoch) or (not sets and self.at_end(LOG, epoch))

    def done(self, what: str) -> None:
        """Note that something was done, for this reason or another."""
        for clock in self._clocks:
            clock.restart(what)
