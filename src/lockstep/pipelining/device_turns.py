"""Turns: who computes next on each device.

Each device has a list, made before the micro-batches start, and whoever is at its head goes next,
however long it takes to come: so sums are made in the same order in every run. What the list
doesn't foresee (a forward that takes another way than the first one did) gets a turn between those
of the list, as soon as the device is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.pipelining.schedule import Key


class Aborted(LockstepError):
    """Another micro-batch has failed; raised in those that wait for their turns."""


@dataclass(eq=False)
class _Waiting:
    """A thread that waits: a lock to be released, and the number that the system has for it."""

    lock: threading.Lock
    thread: int


class _Device:
    """The turns of one device.

    Attributes:
        list: the visits that are still to come, in order.
        waiting: those of the list whose threads wait.
        others: threads that wait for a turn that the list doesn't have.
        is_busy: whether somebody computes there.
    """

    def __init__(self, order: Sequence[Key]) -> None:
        self.list = deque(order)
        self.waiting: dict[Key, _Waiting] = {}
        self.others: deque[_Waiting] = deque()
        self.is_busy = False

    def add(self, mine: _Waiting, key: Key | None) -> None:
        """Let a thread wait for a visit; None is one that the list doesn't have."""
        if key is None:
            self.others.append(mine)
            return
        if key in self.waiting:  # it came by what that one had computed
            self.others.append(self.waiting[key])
        self.waiting[key] = mine

    def next(self) -> _Waiting | None:
        """Take out the thread whose turn it is, if it is here."""
        if self.is_busy:
            return None
        if self.list and self.list[0] in self.waiting:
            return self.waiting.pop(self.list.popleft())
        if self.others:
            return self.others.popleft()
        return None

    def free_all(self) -> None:
        """Free all that wait."""
        for mine in (*self.waiting.values(), *self.others):
            mine.lock.release()
        self.waiting.clear()
        self.others.clear()


class Turns:
    """The lists of all devices, and who waits.

    Args:
        orders: for each device, in which order its stages are visited.
        places: for each stage the device that holds it.
        beckon: called with the system's number of a thread that waits, and the device on which it
            goes on now.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Key]],
        places: Sequence[int],
        beckon: Callable[[int, int], None],
    ) -> None:
        self._devices = [_Device(order) for order in orders]
        self._places = places
        self._beckon = beckon
        self._lock = threading.Lock()
        self._is_aborted = False

    def take(self, stage: int, key: Key | None) -> None:
        """Wait until it is this visit's turn; None is one that no list has.

        Raises:
            Aborted: another micro-batch has failed.
        """
        place = self._places[stage]
        mine = _Waiting(threading.Lock(), threading.get_native_id())
        with self._lock:
            if not self._is_aborted:
                mine.lock.acquire()
                self._devices[place].add(mine, key)
                self._wake(place)
        mine.lock.acquire()
        if self._is_aborted:
            raise Aborted("stopped, because another micro-batch failed")

    def leave(self, stage: int) -> None:
        """End the visit that is on this stage."""
        place = self._places[stage]
        with self._lock:
            self._devices[place].is_busy = False
            self._wake(place)

    def skip(self, stage: int, key: Key) -> None:
        """Leave out a visit that will not come."""
        place = self._places[stage]
        with self._lock:
            if key in self._devices[place].list:
                self._devices[place].list.remove(key)
            self._wake(place)

    def abort(self) -> None:
        """Free all that wait, now and later."""
        with self._lock:
            self._is_aborted = True
            for device in self._devices:
                device.free_all()

    def _wake(self, place: int) -> None:
        """Give the device to who is next, if it is free and somebody is here."""
        device = self._devices[place]
        mine = device.next()
        if mine is None:
            return
        device.is_busy = True
        if mine.thread != threading.get_native_id():
            self._beckon(mine.thread, place)
        mine.lock.release()
