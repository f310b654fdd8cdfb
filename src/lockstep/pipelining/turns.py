"""Turns: who computes next on each device.

Each device has a list, made before the micro-batches start, and whoever is at its head goes next,
however long it takes to come: so sums are made in the same order in every run. What the list
doesn't foresee (a forward that takes another way than the first one did) gets a turn between those
of the list, as soon as the device is free.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.pipelining.schedule import Key


class Aborted(LockstepError):
    """Another micro-batch has failed; raised in those that wait for their turns."""


class Stuck(LockstepError):
    """All micro-batches that are under way wait for their turns, so none will ever come; raised
    in one of them.
    """


@dataclass(eq=False)
class _Waiting:
    """Who waits: a lock to be released, the number that the system has for the thread, and
    whether it is stuck.
    """

    lock: threading.Lock
    thread: int
    stuck: bool = False


class Turns:
    """The lists of all devices, and who waits.

    Args:
        orders: for each device, in which order its stages are visited.
        places: for each stage the device that holds it.
        beckon: called with the system's number of a thread that waits, and the device on which it
            goes on now.
        microbatches: how many micro-batches there are, each in a thread; None is not to look whether all
            of them wait.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Key]],
        places: Sequence[int],
        beckon: Callable[[int, int], None] = lambda thread, device: None,
        microbatches: int | None = None,
    ) -> None:
        self._orders = orders
        self._places = places
        self._beckon = beckon
        self._under_way = microbatches
        self._lock = threading.Lock()
        self._heads = [0] * len(orders)
        self._busy: list[Key | bool | None] = [False] * len(orders)
        self._waiting: dict[Key, _Waiting] = {}
        self._others: list[deque[_Waiting]] = [deque() for _ in orders]
        self._skipped: set[Key] = set()
        self._aborted = False

    def take(self, stage: int, key: Key | None) -> None:
        """Wait until it is this visit's turn; None is one that no list has.

        Raises:
            Aborted: another micro-batch has failed.
            Stuck: all of them wait.
        """
        device = self._places[stage]
        mine = _Waiting(threading.Lock(), threading.get_native_id())
        with self._lock:
            if not self._aborted:
                mine.lock.acquire()
                self._add(mine, device, key)
                self._wake(device)
                self._free_if_stuck()
        mine.lock.acquire()
        if mine.stuck:
            raise Stuck("all micro-batches wait")
        if self._aborted:
            raise Aborted("stopped, because another micro-batch failed")

    def _add(self, mine: _Waiting, device: int, key: Key | None) -> None:
        if key is None:
            self._others[device].append(mine)
            return
        other = self._waiting.get(key)
        if other is not None:  # it came by what that one had computed
            self._others[device].append(other)
        self._waiting[key] = mine

    def leave(self, stage: int) -> None:
        """This visit is over."""
        device = self._places[stage]
        with self._lock:
            if self._busy[device] is not None:
                self._heads[device] += 1
            self._busy[device] = False
            self._wake(device)
            self._free_if_stuck()

    def skip(self, stage: int, keys: Iterable[Key]) -> None:
        """These visits will not come."""
        with self._lock:
            self._skipped.update(keys)
            self._wake(self._places[stage])

    def arrive(self) -> None:
        """A micro-batch is through."""
        with self._lock:
            if self._under_way is not None:
                self._under_way -= 1
                self._free_if_stuck()

    def abort(self) -> None:
        """Free all that wait, now and later."""
        with self._lock:
            self._aborted = True
            for mine in itertools.chain(self._waiting.values(), *self._others):
                mine.lock.release()
            self._waiting.clear()
            self._others = [deque() for _ in self._orders]

    def _free_if_stuck(self) -> None:
        """Free one of those that wait, if nobody is left who could: it fails, and that frees the
        others.
        """
        waiting = len(self._waiting) + sum(map(len, self._others))
        if self._aborted or not waiting or waiting != self._under_way:
            return
        key = min(self._waiting, default=None)
        others = next(filter(None, self._others), deque[_Waiting]())
        one = others.popleft() if key is None else self._waiting.pop(key)
        one.stuck = True
        one.lock.release()

    def _wake(self, device: int) -> None:
        """Give the free device to who is next, if it is here."""
        if self._busy[device] is not False:
            return
        head = self._head_of(device)
        if head in self._waiting:
            mine = self._waiting.pop(head)
            self._busy[device] = head
        elif self._others[device]:
            mine = self._others[device].popleft()
            self._busy[device] = None
        else:
            return
        if mine.thread != threading.get_native_id():
            self._beckon(mine.thread, device)
        mine.lock.release()

    def _head_of(self, device: int) -> Key | None:
        """The next visit of a device's list that is to come."""
        order = self._orders[device]
        while self._heads[device] < len(order):
            key = order[self._heads[device]]
            if key not in self._skipped:
                return key
            self._heads[device] += 1
        return None
