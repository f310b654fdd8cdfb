"""World: which rank this process is, of how many, with which devices; and what ranks say to one
another.

A process joins its group in ``processes/group.py``. One process that drives all its devices is a
world of size 1 and has no group: every collective below is then the identity.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.launch import cores as _cores
from lockstep.launch.devices import Device
from lockstep.launch.layout import DataShare, Layout
from lockstep.launch.observer import Observer, phase
from lockstep.run import stop_request

P = ParamSpec("P")
T = TypeVar("T")


END_OF_CALLBACKS = "the end of callbacks"
"""What ranks meet at that have no call of a callback's to make."""

COLLECTIVES: set[str] = set()
"""Names of the methods of World in which ranks wait for one another."""


def _collective(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a method of World in which ranks wait for one another."""
    COLLECTIVES.add(function.__name__)
    run = phase("communicating", function.__name__)(function)

    @functools.wraps(function)
    def counted(*args: P.args, **named: P.kwargs) -> T:
        world: World = args[0]  # type: ignore[assignment]
        world.collectives += 1
        return run(*args, **named)

    return counted


_SMALL = 1 << 18
"""Bytes up to which a sum costs less than being woken up for it."""

_FEW = 4
"""Ranks up to which sending everything to everybody beats a ring, for small tensors."""

_PATIENCE = 1e-3
"""Seconds to wait awake. Beyond that another process wants the core: newer Linux schedulers may
then leave a yielding thread in front of gloo's own for a whole time slice (4 ms), where a sleeping
one is out of the way.
"""


def _to_nobody(event: Any) -> None:
    """Drop an event."""


def _to_stderr(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # in one piece, whichever thread prints meanwhile


def _end_process(error: Exception) -> None:
    _to_stderr(f"lockstep: {error}")
    os._exit(1)


@dataclass(eq=False)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: the number of this process, from 0.
        size: how many processes there are.
        devices: the devices that this process drives: one per rank, the stages of its replica, or
            all of them where ``size`` is 1.
        local_rank: the number of this process on its node.
        local_size: how many processes this node has.
        backend: the process group's backend (``"gloo"``, ``"nccl"``), or None without a group.
        step: the step this process is in, for the heads of error messages; 0 before the first.
        folder: where this run keeps its files, or None.
        own_group: whether Lockstep made the process group, and leaves it.
        emit: sends an event to the process that launched the ranks (does nothing elsewhere).
        print: prints a text at once, from any rank.
        fail: ends this process's part of the training with an error, from another thread than the
            training's.
        thread: that in which the training runs.
        collectives, beats: how many there were so far; a training in which neither they nor its
            step move has no progress.
        is_watched: a training without progress is reported.
        layout: what a strategy does with the devices; by itself each of them has a local batch.
        in_step: the ranks make their steps together, so that all end after the same one.
        at_end: what is undone when the work in this world is done.
        observers: look at the updates that are made in this world, and at what its ranks do
            together.
    """

    rank: int = 0
    size: int = 1
    devices: tuple[Device, ...] = ()
    local_rank: int = 0
    local_size: int = 1
    backend: str | None = None
    step: int = 0
    folder: str | None = None
    own_group: bool = True
    emit: Callable[[Any], None] = _to_nobody
    print: Callable[[str], None] = _to_stderr
    fail: Callable[[Exception], None] = _end_process
    thread: int = field(default_factory=threading.get_ident)
    collectives: int = field(default=0, init=False)
    beats: int = field(default=0, init=False)
    is_watched: bool = field(default=False, init=False)
    in_step: bool = False
    layout: Layout = field(init=False)
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    observers: list[Observer] = field(default_factory=list, init=False)
    _meetings: int = field(default=0, init=False)
    _board = cast("memoryview | None", None)
    """Where the ranks of one launch keep their steps for all to see (see ``processes.call``); no
    field of the class.
    """

    def __post_init__(self) -> None:
        self.layout = Layout({"data": self.size * len(self.devices)}, max(1, len(self.devices)))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "step" and self._board is not None:
            self.announce(value)

    def beat(self) -> None:
        """Note that the training comes further, where neither its step nor its collectives show
        that.
        """
        self.beats += 1

    @property
    def device(self) -> Device:
        """The first device of this process (its only one, where each device has a process)."""
        return self.devices[0]

    @property
    def data(self) -> DataShare:
        """What this process reads of each batch."""
        return self.layout.read_by(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @_collective
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place, and give it back.

        A small sum on CPU takes as long as its wake-ups. So few ranks send each other everything in
        one exchange (gloo's own sum takes two) and add it up in rank order, and the core is yielded
        for a while before going to sleep.
        """
        if self.size == 1:
            return tensor
        small = tensor.numel() * tensor.element_size() <= _SMALL
        if not tensor.is_cpu or not small:
            dist.all_reduce(tensor)
        elif self.size <= _FEW and tensor.is_contiguous():
            found = [torch.empty_like(tensor) for _ in range(self.size)]
            wait_awake(dist.all_gather(found, tensor, async_op=True))
            torch.add(found[0], found[1], out=tensor)
            for other in found[2:]:
                tensor.add_(other)
        else:
            wait_awake(dist.all_reduce(tensor, async_op=True))
        return tensor

    @_collective
    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the object that rank ``source`` gave; the others' are ignored."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, source, device=self.exchange_device)
        result: T = box[0]
        return result

    @_collective
    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait until every rank is here; the host waits, on accelerators too."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self.exchange_device)).item()

    @property
    def is_local_rank(self) -> bool:
        """Whether this process is one of several that a process of this machine has launched,
        and watches.
        """
        return self._board is not None

    def asked_to_stop(self) -> bool:
        """Return whether a person or the system has asked to save and stop the training."""
        return stop_request.asked() if self._board is None else bool(self._board[-1])

    def announce(self, step: int) -> None:
        """Let the other ranks see that this one is about to enter a step, where they can
        (``step_of``).
        """
        if self._board is not None:
            self._board[self.rank] = step

    def step_of(self, rank: int) -> int:
        """Return the step that a rank is in, or about to enter, as far as this one can see."""
        return self.step if self._board is None else self._board[rank]

    def meet(self, what: str, *, waits: float = 30.0, together: bool = True) -> None:
        """Wait until every rank has called this with the same words, by the store of the process
        group.

        It is for what a person calls, perhaps on one rank only: a collective that some ranks don't
        come to would end the process, or be taken for another one.

        Args:
            what: the ranks agree on.
            waits: seconds, at most.
            together: the ranks are in the same step, so that one that has gone further won't come.

        Raises:
            InputError: another rank hasn't called it, or with other words. The message is the same
                on all ranks, since any may be the first to fail.
        """
        if self.size == 1:
            return
        self._meetings += 1
        store = dist.distributed_c10d._get_default_store()
        keys = [f"lockstep/meeting-{self._meetings}/{number}" for number in range(self.size)]

        def missing(ranks: Iterable[int]) -> list[int]:
            return [number for number in ranks if not store.check([keys[number]])]

        store.set(keys[self.rank], what)
        end = time.monotonic() + waits
        while late := missing(range(self.size)):
            gone = []
            if together:
                ahead = [one for one in late if self.step_of(one) > self.step_of(self.rank)]
                # asked again, since it may have come, and gone on, meanwhile
                gone = missing(ahead)
            if gone or time.monotonic() > end:
                ranks = gone or late
                named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                text = f"{what} must happen on every rank, but {named} continued without it"
                raise InputError(text)
            time.sleep(1e-3)

        calls = [store.get(key).decode() for key in keys]
        if len(set(calls)) > 1:
            call = next(one for one in calls if one != END_OF_CALLBACKS)
            other = next(number for number, one in enumerate(calls) if one != call)
            text = f"{call} must happen on every rank, but rank {other} reached {calls[other]}"
            raise InputError(text)

    @property
    def exchange_device(self) -> torch.device:
        """Where a few numbers or an object's bytes are put that the ranks exchange: on the CPU,
        if the group can.
        """
        on_cpu = self.backend is None or "cpu:" in dist.get_backend_config()
        return torch.device("cpu") if on_cpu else self.device.torch


def wait_awake(work: dist.Work | None) -> None:
    """Wait for a collective without going to sleep at once: give the core away between looks for
    a while.
    """
    assert work is not None
    end = time.perf_counter() + _PATIENCE
    while not work.is_completed() and time.perf_counter() < end:
        os.sched_yield()
    work.wait()


_current: World | None = None


def current() -> World | None:
    """Return the world that this process has joined, or None where none was."""
    return _current


def enter(world: World | None) -> World | None:
    """Make ``world`` the current one, and give back the one before."""
    global _current
    before, _current = _current, world
    return before


@contextlib.contextmanager
def lone(devices: tuple[Device, ...], folder: str | None = None) -> Iterator[World]:
    """Give the world of one process that drives all these devices, for a while."""
    world = World(devices=devices, folder=folder, fail=stop_request.fail)
    before = enter(world)
    try:
        with _cores.occupied(place_of(devices)), world.at_end:
            yield world
    finally:
        enter(before)


def place_of(devices: tuple[Device, ...]) -> Device:
    """Where the one process of all these devices is.

    Its own thread runs the optimizer for all slots, so it may use all their cores.
    """
    cores = tuple(sorted({core for device in devices for core in device.cores}))
    return Device("cpu", 0, cores) if devices[0].is_slot else devices[0]


def not_within_a_rank() -> None:
    """Refuse to start ranks in a rank.

    Raises:
        InputError: this process is one of several already.
    """
    if _current is not None and _current.size > 1:
        raise InputError(
            f"this process is already rank {_current.rank} of {_current.size}: start a training "
            "or a launch outside of the ranks; in a job file or a script, below if __name__ == "
            '"__main__":'
        )
