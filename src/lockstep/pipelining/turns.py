"""Turns: who computes next on each stage.

Each stage has a list, made before the micro-batches start, and whoever is at its head goes next, however long it takes
to come: so sums are made in the same order in every run. What the list doesn't foresee (a forward that takes another
way than the first one did) gets a turn between those of the list, as soon as the stage is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from lockstep.errors import LockstepError

Key = tuple[int, int]
"""Which visit of its route, of which micro-batch."""


class Aborted(LockstepError):
    """Another micro-batch has failed; raised in those that wait for their turns."""


class Turns:
    """The lists of all stages, and who waits.

    Args:
        orders: for each stage, in which order it is visited.
    """

    def __init__(self, orders: Sequence[Sequence[Key]]) -> None:
        self._orders = orders
        self._lock = threading.Lock()
        self._heads = [0] * len(orders)
        self._busy: list[Key | bool | None] = [False] * len(orders)
        self._waiting: dict[tuple[int, Key], threading.Lock] = {}
        self._others: list[deque[threading.Lock]] = [deque() for _ in orders]
        self._skipped: set[tuple[int, Key]] = set()
        self._aborted = False

    def take(self, stage: int, key: Key | None) -> None:
        """Wait until it is this visit's turn; None is one that no list has.

        Raises:
            Aborted: another micro-batch has failed.
        """
        with self._lock:
            if self._aborted:
                raise Aborted("stopped, because another micro-batch failed")
            if self._is_next(stage, key):
                self._busy[stage] = key
                return
            mine = threading.Lock()
            mine.acquire()
            if key is None:
                self._others[stage].append(mine)
            else:
                self._waiting[stage, key] = mine
        mine.acquire()
        if self._aborted:
            raise Aborted("stopped, because another micro-batch failed")

    def leave(self, stage: int) -> None:
        """This visit is over."""
        with self._lock:
            if self._busy[stage] is not None:
                self._heads[stage] += 1
            self._busy[stage] = False
            self._wake(stage)

    def skip(self, stage: int, keys: Iterable[Key]) -> None:
        """These visits will not come."""
        with self._lock:
            self._skipped.update((stage, key) for key in keys)
            self._wake(stage)

    def abort(self) -> None:
        """Free all that wait, now and later."""
        with self._lock:
            self._aborted = True
            for mine in (*self._waiting.values(), *(lock for others in self._others for lock in others)):
                mine.release()
            self._waiting.clear()
            for others in self._others:
                others.clear()

    def _is_next(self, stage: int, key: Key | None) -> bool:
        if self._busy[stage] is not False:
            return False
        return key is None or self._head(stage) == key

    def _head(self, stage: int) -> Key | None:
        order = self._orders[stage]
        while self._heads[stage] < len(order) and (stage, order[self._heads[stage]]) in self._skipped:
            self._heads[stage] += 1
        return order[self._heads[stage]] if self._heads[stage] < len(order) else None

    def _wake(self, stage: int) -> None:
        """Give the free stage to who is next, if it is here."""
        if self._busy[stage] is not False:
            return
        head = self._head(stage)
        if head is not None and (mine := self._waiting.pop((stage, head), None)) is not None:
            self._busy[stage] = head
            mine.release()
        elif self._others[stage]:
            self._busy[stage] = None
            self._others[stage].popleft().release()
