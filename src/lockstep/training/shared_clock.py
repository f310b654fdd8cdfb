"""Rank 0's clock, for what all ranks do after a time."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lockstep.launch.world import World


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

    def __init__(self, world: World, seconds: Mapping[str, float], *, together: bool) -> None:
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
