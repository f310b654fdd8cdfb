"""When a training evaluates, saves and logs: after so many steps or epochs, or after a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.world import World
from lockstep.settings import Every
from lockstep.strategies.steps.step import Step

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
        step: of this rank.
        batches_of: the number of batches of an epoch (from 0); None where only its end tells.

    Raises:
        JobError: a part of an epoch is asked for, whose length isn't known.
    """

    def __init__(
        self,
        job: Job,
        step: Step,
        batches_of: Callable[[int], int | None],
    ) -> None:
        self._world = step.world
        self._batches_of = batches_of
        self._together = step.together
        self._clips = job.clip_norm is not None
        self._every = {
            LOG: Every.read(job.log_every, "log_every"),
            EVALUATE: Every.read(job.eval_every, "eval_every"),
            SAVE: Every.read(job.save_every, "save_every"),
        }

        self._counted: dict[str, Every] = {}  # by steps, or by parts of epochs
        seconds: dict[str, float] = {}
        for what, every in self._every.items():
            if not every.is_within:
                continue
            if not self._together and what != LOG:
                continue  # ranks that don't meet would meet in other collectives at the same time
            if every.seconds is not None:
                seconds[what] = every.seconds
                continue

            self._counted[what] = every
            if every.epochs is not None and batches_of(0) is None:
                name = f"{what}_every"
                raise JobError(
                    f"{name}: {getattr(job, name)!r} is a part of an epoch, and a stream has no "
                    "length that is known: give steps (100) or a time (10min)"
                )

        self._clock = SharedClock(step.world, seconds, together=self._together)

    def notes(self) -> Iterator[str]:
        """Yield what a person has to know of the settings, where ranks don't meet in each update."""
        if not self._together and any(every.is_within for every in self._every.values()):
            yield (
                "ranks synchronize at the end of an epoch only, and evaluate and save there; losses "
                "within an epoch are rank 0's"
            )

    def after_step(self, epoch: int, position: int) -> frozenset[str]:
        """Return what is due after this step, but for what the end of an epoch makes due.

        Args:
            epoch: completed epochs.
            position: completed batches of the next one.
        """
        due = self._clock.over()
        for what, every in self._counted.items():
            if self._is_completed(every, epoch, position, self._world.step):
                due |= {what}
        return due

    def wants_norm(self, epoch: int, position: int) -> bool:
        """Return whether the next step computes the norm of the gradients.

        With ``clip_norm`` each step does, otherwise one that may be logged within an epoch.

        Args:
            epoch: completed epochs.
            position: completed batches of the next one.
        """
        if self._clips:
            return True
        if LOG in self._counted:
            every = self._counted[LOG]
            return self._is_completed(every, epoch, position + 1, self._world.step + 1)
        return self._clock.looks_next(LOG)

    def _is_completed(
        self,
        every: Every,
        epoch: int,
        position: int,
        step: int,
    ) -> bool:
        """Return whether this step completes a number of steps, or a part of an epoch."""
        if every.steps is not None:
            return step % every.steps == 0

        part = every.epochs
        batches = self._batches_of(epoch)
        assert part is not None and batches is not None
        now = epoch + Fraction(position, batches)
        before = epoch + Fraction(position - 1, batches)
        return now // part > before // part

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
        self._clock.restart(what)


class SharedClock:
    """Tells which times are over, alike on every rank.

    Rank 0 looks at its clock for all ranks. It sends what is over, and the step at which it looks
    again: about when half of the time that is left is over, and at most after as many steps as were
    made so far.

    Args:
        world: this rank's.
        seconds: how long each time is, by its name.
        together: whether the ranks meet in each update; else each of them goes by its own clock.
    """

    def __init__(
        self,
        world: World,
        seconds: Mapping[str, float],
        *,
        together: bool,
    ) -> None:
        self._world = world
        self._seconds = seconds
        self._together = together
        self._first = world.step
        self._next_look = world.step + 1
        self._began = time.monotonic()
        self._last = dict.fromkeys(seconds, self._began)

    def restart(self, name: str) -> None:
        """Begin a time anew."""
        self._last[name] = time.monotonic()

    def left(self, name: str) -> float:
        """Return the seconds that are left of a time, by this process's clock."""
        return self._seconds[name] - (time.monotonic() - self._last[name])

    def looks_next(self, name: str) -> bool:
        """Return whether this time may be found to be over after the next step."""
        return name in self._seconds and self._world.step + 1 >= self._next_look

    def over(self) -> frozenset[str]:
        """Return the times that are found to be over after this step."""
        step = self._world.step
        if not self._seconds or step < self._next_look:
            return frozenset()

        over = set()
        soonest = float("inf")
        for name, seconds in self._seconds.items():
            left = self.left(name)
            if left <= 0:
                over.add(name)
                left = seconds
            soonest = min(soonest, left)

        steps = step - self._first
        steps_left = soonest * steps / (time.monotonic() - self._began)
        ahead = max(1, min(steps, int(steps_left / 2)))
        found = frozenset(over), step + ahead
        if self._together:
            found = self._world.broadcast_object(found)
        found_over, self._next_look = found
        return found_over
