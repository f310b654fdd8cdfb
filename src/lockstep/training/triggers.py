"""When a training evaluates, saves and logs: after so many steps or epochs, or after a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from lockstep.errors import JobError
from lockstep.job import Every, Job
from lockstep.launch.world import World

LOG, EVALUATE, SAVE = "log", "eval", "save"
"""Each with ``_every`` is a setting's name."""

_NOTHING: frozenset[str] = frozenset()


class Triggers:
    """What is due after a step, alike on every rank.

    Steps and epochs are counted by each rank; a part of an epoch is due at the step that completes
    it. A time is looked at by rank 0, which then tells the others what is due, and at which step it
    looks again: about when the next time is over, and at most after twice as many steps. All times
    are looked at together.
    """

    def __init__(
        self, job: Job, world: World, batches_of: Callable[[int], int | None], *, together: bool
    ) -> None:
        self._world, self._batches_of, self._together = world, batches_of, together
        self._every = {
            LOG: Every.read(job.log_every, "log_every"),
            EVALUATE: Every.read(job.eval_every, "eval_every"),
            SAVE: Every.read(job.save_every, "save_every"),
        }
        # Ranks that don't meet in their updates would meet in other collectives at the same time.
        within = {what: every for what, every in self._every.items() if together or what == LOG}
        self._steps = {
            what: every.steps for what, every in within.items() if every.steps is not None
        }
        self._seconds = {
            what: every.seconds for what, every in within.items() if every.seconds is not None
        }
        self._epochs = {
            what: every.epochs for what, every in within.items() if every.epochs and every.is_within
        }
        for what in self._epochs if batches_of(0) is None else ():
            name = f"{what}_every"
            raise JobError(
                f"{name}: {getattr(job, name)!r} is a part of an epoch, and a stream has no "
                "length that is known: give "
                "steps (100) or a time (10min)"
            )
        # A log is rank 0's alone, unless functions see it that may stop the training.
        alone = not (together and (job.on_event or job.callbacks))
        self._log_after = self._seconds.pop(LOG, None) if alone else None
        self._first = world.step
        self._began = time.monotonic()
        self._last = dict.fromkeys(self._every, self._began)
        self._look = world.step + 1

    def notes(self) -> Iterator[str]:
        """What a person has to know of them."""
        for what, every in {} if self._together else self._every.items():
            if every.is_within and what == LOG:
                yield (
                    "log_every: these ranks don't meet in a step, so that the losses within an "
                    "epoch are rank 0's"
                )
            elif every.is_within:
                yield (
                    f"{what}_every: these ranks meet at the end of an epoch only, and "
                    f"{_DOES[what]} there"
                )

    def after_step(self, epoch: int, position: int) -> frozenset[str]:
        """What is due after this step; ``at_end`` tells what an epoch's end makes due.

        Args:
            epoch: epochs that are done.
            position: batches of the one that is not.
        """
        if not (self._steps or self._epochs or self._seconds) and self._log_after is None:
            return _NOTHING
        step = self._world.step
        due = frozenset(what for what, steps in self._steps.items() if step % steps == 0)
        if self._epochs:
            of = self._batches_of(epoch)
            assert of is not None
            now, before = (
                Fraction(epoch * of + position, of),
                Fraction(epoch * of + position - 1, of),
            )
            due |= {
                what for what, epochs in self._epochs.items() if now // epochs > before // epochs
            }
        if self._seconds and step >= self._look:
            due |= self._over()
        if self._log_after is not None and time.monotonic() - self._last[LOG] >= self._log_after:
            due |= {LOG}
        return due

    def _over(self) -> frozenset[str]:
        """The times that are over, by rank 0's clock."""
        now = time.monotonic()
        done = self._world.step - self._first
        left = {what: seconds - (now - self._last[what]) for what, seconds in self._seconds.items()}
        due = frozenset(what for what, seconds in left.items() if seconds <= 0)
        soonest = min(self._seconds[what] if what in due else left[what] for what in left)
        ahead = max(1, min(done, int(soonest * done / (now - self._began))))
        found, self._look = self._world.broadcast_object((due, self._world.step + ahead))
        return found

    def at_end(self, what: str, epoch: int) -> bool:
        """Whether it is due at the end of that epoch (from 1), for that reason alone."""
        every = self._every[what]
        if every.epochs is None or every.is_within:
            return what != EVALUATE or not self._together
        return epoch % every.epochs == 0

    def evaluates_at_end(self, epoch: int, sets: Mapping[str, Any]) -> bool:
        """Whether callbacks are told of an evaluation there; without evaluation ``sets`` where
        the epoch is logged.
        """
        return self.at_end(EVALUATE, epoch) or (not sets and self.at_end(LOG, epoch))

    def done(self, what: str) -> None:
        """It was done, for this reason or another."""
        self._last[what] = time.monotonic()


_DOES = {EVALUATE: "evaluate", SAVE: "save"}
