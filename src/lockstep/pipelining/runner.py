"""Runner: lets the micro-batches of one update go through the stages.

On slots of the CPU each micro-batch has a thread, and computes on the cores of the stage whose turn
it has::

    thread 0    0F  1F     1B  0B
    thread 1        0F  1F     1B  0B           at most one on each stage
    thread 2            0F ...

On accelerators the threads only queue work, and there is one turn for all devices: one thread at a
time queues what its stage has to do, in the order in which stages would begin (`card_queues`).

The first update goes one micro-batch after the other. It shows the route, which the lists of turns
are made from, and whether micro-batches may overlap at all (`overlap`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.pipelining.card_queues import CardQueues
from lockstep.pipelining.microbatch import MicroBatch
from lockstep.pipelining.overlap import Overlap
from lockstep.pipelining.schedule import Key, Route, Schedule, merged, orders_of
from lockstep.pipelining.turns import Aborted, Turns
from lockstep.report.timeline import Action, Span, Timeline
from lockstep.tensors.seeding import states
from lockstep.threads.thread_pool import ThreadPool

T = TypeVar("T")

_cores = threading.local()

_COPYING = 8
"""Streams that micro-batches copy on, on each accelerator: PyTorch has 32, which it hands out
again and again.
"""


@dataclass(frozen=True)
class Work:
    """What is to be computed of the micro-batches of an update.

    Attributes:
        begin: called before the forward of a micro-batch that draws from the generators
            themselves: on slots one that others don't overlap, on accelerators any that draws.
        forward: of the micro-batch of that number: model and loss.
        backward: of the same, given what forward gave.
        count: how many there are.
    """

    begin: Callable[[int], None]
    forward: Callable[[int], Any]
    backward: Callable[[int, Any], Any]
    count: int


class Runner:
    """The micro-batches of a model's updates.

    Args:
        model: with its hooks (see ``stage_layers``).
        world: whose devices hold the stages.
        schedule: the lists for a number of micro-batches.
        places: for each stage which of the devices holds it.

    Attributes:
        overlaps: whether micro-batches are under way at the same time, each in its thread.
        streamed: whether they are, and each needs a random stream of its own.
        schedule: as given.
        timelines: when each stage computed in each update, where that is noted (a list is there),
            not on accelerators.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        schedule: Callable[[int], Schedule],
        places: Sequence[int],
    ) -> None:
        self.schedule = schedule
        self.overlaps = False
        self.streamed = False
        self.timelines: list[Timeline] | None = None
        self._world = world
        self._places = tuple(places)
        self._devices = [world.devices[place] for place in places]  # of each stage
        self._is_on_slots = world.device.is_slot
        accelerators = [device.torch for device in self._devices if not device.is_slot]
        self._overlap = Overlap(model, world, len(places), accelerators)
        self._orders: dict[tuple[Route, int], list[list[Key]]] = {}
        self._threads: ThreadPool | None = None
        self._copying: dict[tuple[torch.device, int], torch.Stream] = {}
        self._shared: dict[int, torch.Tensor] = {}

    def run(self, work: Work) -> list[Any]:
        """Forward and backward of each micro-batch; what each gave.

        Errors get a note that names the micro-batch and the stage.
        """
        self.overlaps = work.count > 1 and self._overlap.allowed
        self.streamed = self.overlaps and self._is_on_slots and self._overlap.draws
        if self.overlaps:
            return self._overlapped(work)
        if self._is_on_slots:
            return self._in_threads([lambda: self._in_turn(work)], work.count)[0]
        try:
            return self._in_turn(work)
        finally:
            self._occupy(0)

    def evaluate(self, compute: Callable[[], T]) -> T:
        """What this gives, where it calls the model, each layer on the device of its stage;
        without backward.
        """
        if not self._is_on_slots:  # forwards overlap in the queues of the devices
            return compute()

        def go() -> T:
            with MicroBatch(0, self._occupy) as microbatch, self._noted(microbatch, "evaluation"):
                return compute()

        return self._in_threads([go], 1)[0]

    # ---- the micro-batches of an update ----------------------------------------------------------

    def _in_turn(self, work: Work) -> list[Any]:
        """One micro-batch after the other, in one thread."""
        results = []
        microbatches = []
        for number in range(work.count):
            work.begin(number)
            microbatch = MicroBatch(number, self._occupy)
            microbatches.append(microbatch)
            with self._overlap.observing(microbatch, work.count):
                results.append(self._compute(microbatch, work))
        self._note_timeline(microbatches)
        return results

    def _overlapped(self, work: Work) -> list[Any]:
        """Each micro-batch in a thread of its own; they wait for their turns."""
        route = self._overlap.route
        orders = self._orders_for(route, work.count)
        # (On accelerators there is one turn for all devices.)
        places = self._places if self._is_on_slots else [0] * len(self._places)
        turns = Turns(orders, places, self._beckon, work.count)
        numbers = range(work.count)
        microbatches = [MicroBatch(number, self._occupy, route, turns) for number in numbers]
        if not self._is_on_slots:
            self._give_queues(microbatches)
        functions = [functools.partial(self._in_own_thread, one, work) for one in microbatches]
        self._overlap.begin()
        results = self._in_threads(functions, work.count, [turns.abort])
        self._overlap.end(microbatches)
        self._note_timeline(microbatches)
        return results

    def _orders_for(self, route: Route, count: int) -> list[list[Key]]:
        key = route, count
        if key not in self._orders:
            orders = orders_of(route, self.schedule(count), count)
            self._orders[key] = orders if self._is_on_slots else [merged(route, orders)]
        return self._orders[key]

    def _in_own_thread(self, microbatch: MicroBatch, work: Work) -> Any:
        # Else a weight's copy would belong to one micro-batch's graph.
        torch.set_autocast_cache_enabled(False)
        if microbatch.queues is None:
            return self._compute(microbatch, work)
        with microbatch.queues.streams():
            return self._compute(microbatch, work)

    def _compute(self, microbatch: MicroBatch, work: Work) -> Any:
        # (Autograd's own threads, one for each accelerator, couldn't wait for turns.)
        in_threads = torch.autograd.set_multithreading_enabled(self._is_on_slots)
        with in_threads, microbatch, self._noted(microbatch):
            if microbatch.queues is not None:
                microbatch.queues.begin()
                if microbatch.queues.draws:
                    work.begin(microbatch.number)
            made = work.forward(microbatch.number)
            microbatch.turn_back()
            return work.backward(microbatch.number, made)

    def _give_queues(self, microbatches: Sequence[MicroBatch]) -> None:
        """To micro-batches that overlap on accelerators; with random numbers of their own, if
        they draw any.
        """
        random = states(self._overlap.accelerators) if self._overlap.draws else None
        places = [device.torch for device in self._devices]
        computing = {place: torch.accelerator.current_stream(place) for place in places}
        for microbatch in microbatches:
            number = microbatch.number % _COPYING
            copying = {place: self._copying_stream(place, number) for place in computing}
            microbatch.queues = CardQueues(places, computing, copying, random, self._shared)

    def _copying_stream(self, place: torch.device, number: int) -> torch.Stream:
        key = place, number
        if key not in self._copying:
            self._copying[key] = torch.Stream(place)
        return self._copying[key]

    @contextlib.contextmanager
    def _noted(self, microbatch: MicroBatch, what: str = "") -> Iterator[None]:
        """Errors get a note that says where they came from."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, Aborted | InputError):
                stage = microbatch.stage or 0
                what = what or f"{microbatch.direction} of micro-batch {microbatch.number}"
                error.add_note(
                    f"raised in stage {stage} ({self._devices[stage]}), {what}, at step "
                    f"{self._world.step}"
                )
            raise

    def _note_timeline(self, microbatches: Sequence[MicroBatch]) -> None:
        """Keep when the stages computed in an update that is over."""
        # (Threads of accelerators only queue work.)
        if self.timelines is None or not self._is_on_slots:
            return
        spans: list[list[Span]] = [[] for _ in self._world.devices]
        for microbatch in microbatches:
            for visit, start, end in microbatch.stays:
                span = Span(Action(*visit, microbatch.number), start, end)
                spans[self._places[visit.stage]].append(span)
        for of_device in spans:
            of_device.sort(key=lambda span: span.start)
        self.timelines.append(Timeline(tuple(map(tuple, spans))))

    # ---- threads and cores -----------------------------------------------------------------------

    def _in_threads(
        self,
        functions: Sequence[Callable[[], T]],
        count: int,
        on_abort: Sequence[Callable[[], None]] = (),
    ) -> list[T]:
        """Call these at the same time, in the first of ``count`` threads; ``on_abort`` frees
        those that wait.
        """
        threads = self._enough_threads(count)
        threads.on_abort[:] = on_abort
        idle = [None] * (len(threads.devices) - len(functions))
        try:
            found = threads.run([*functions, *idle])
        finally:
            if any(device.threads > 1 for device in self._devices):
                # A thread's limit is also that of all new ones.
                torch.set_num_threads(torch.get_num_threads())
        return found[: len(functions)]  # type: ignore[return-value]  # each has run

    def _enough_threads(self, count: int) -> ThreadPool:
        if self._threads is None or len(self._threads.devices) < count:
            if self._threads is not None:
                self._threads.close()
            # Bound to no core yet: each goes to those of its stage.
            home = self._world.device
            slots = [
                Device("cpu", number) if self._is_on_slots else home for number in range(count)
            ]
            self._threads = ThreadPool(slots, role="")
        return self._threads

    def _occupy(self, stage: int) -> None:
        """This thread computes on the stage's device from now on."""
        device = self._devices[stage]
        if not device.is_slot:
            torch.accelerator.set_device_index(device.index)
            return
        before: tuple[int, ...] = getattr(_cores, "now", ())
        if device.cores == before:
            return
        _cores.now = device.cores
        if max(1, len(before)) != device.threads:
            _devices.limit_threads(device)
        if len(device.cores) == 1:
            _devices.pin(device)
        elif len(before) == 1:
            _set_cores(0, _devices.usable_cores())

    def _beckon(self, thread: int, place: int) -> None:
        """Let a thread that sleeps wake up on the core where it will compute.

        Where it was pinned before another may compute, which would keep it from going where it is
        waited for.
        """
        device = self._world.devices[place]
        if len(device.cores) == 1:
            _set_cores(thread, device.cores)


def _set_cores(thread: int, cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)
