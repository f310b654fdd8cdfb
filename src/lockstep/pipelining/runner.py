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
from collections.abc import Callable, Sequence
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
from lockstep.tensors.seeding import States, states
from lockstep.threads.thread_pool import Team

T = TypeVar("T")

_cores = threading.local()

_COPYING = 8
"""Streams that micro-batches copy on, on each accelerator: PyTorch has 32, which it hands out
again and again.
"""


@dataclass(frozen=True)
class _Work:
    """As ``Runner.run`` was given it."""

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
        self._world = world
        self._places = tuple(places)
        self._devices = tuple(world.devices[place] for place in places)  # of each stage
        self.schedule = schedule
        self._slots = world.device.is_slot
        accelerators = [] if self._slots else [device.torch for device in self._devices]
        self._overlap = Overlap(model, world, len(places), dict.fromkeys(accelerators))
        self._orders: dict[tuple[Route, int], list[list[Key]]] = {}
        self._team: Team | None = None
        self._copying: dict[tuple[torch.device, int], torch.Stream] = {}
        self._shared: dict[int, torch.Tensor] = {}
        self.overlaps = False
        self.streamed = False
        self.timelines: list[Timeline] | None = None

    def run(
        self,
        begin: Callable[[int], None],
        forward: Callable[[int], Any],
        backward: Callable[[int, Any], Any],
        count: int,
    ) -> list[Any]:
        """Forward and backward of each micro-batch; what each gave.

        Errors get a note that names the micro-batch and the stage.

        Args:
            begin: called before the forward of a micro-batch that draws from the generators
                themselves: on slots one that others don't overlap, on accelerators any that draws.
            forward: of the micro-batch of that number: model and loss.
            backward: of the same, given what forward gave.
            count: how many there are.
        """
        work = _Work(begin, forward, backward, count)
        self.overlaps = count > 1 and self._overlap.allowed
        self.streamed = self.overlaps and self._slots and self._overlap.draws
        microbatches: list[MicroBatch] = []
        found = (self._overlapped if self.overlaps else self._in_turn)(work, microbatches)
        self._note(microbatches)
        return found

    def evaluate(self, compute: Callable[[], T]) -> T:
        """What this gives, where it calls the model, each layer on the device of its stage;
        without backward.
        """
        if (
            not self._slots
        ):  # (forwards that follow one another overlap in the queues of the devices)
            return compute()

        def go() -> T:
            with (
                MicroBatch(0, self._occupy) as microbatch,
                self._told(microbatch, "evaluation"),
            ):
                return compute()

        return self._in_threads([go], 1)[0]

    def _in_threads(
        self,
        functions: Sequence[Callable[[], T]],
        count: int,
        on_abort: Sequence[Callable[[], None]] = (),
    ) -> list[T]:
        """Call these at the same time, in the first of ``count`` threads; ``on_abort`` frees
        those that wait.
        """
        if self._team is None or len(self._team.devices) < count:
            if self._team is not None:
                self._team.close()
            # Bound to no core yet: each goes to those of its stage.
            home = self._world.device
            self._team = Team(
                [Device("cpu", i) if self._slots else home for i in range(count)], role=""
            )
        self._team.on_abort[:] = on_abort
        try:
            found = self._team.run(
                [*functions, *[None] * (len(self._team.devices) - len(functions))]
            )
            return found[: len(functions)]  # type: ignore[return-value]  # each has run
        finally:
            if any(device.threads > 1 for device in self._devices):
                torch.set_num_threads(
                    torch.get_num_threads()
                )  # a thread's limit is also that of all new ones

    def _occupy(self, stage: int) -> None:
        """This thread computes on the stage's device from now on."""
        device = self._devices[stage]
        if not device.is_slot:
            torch.accelerator.set_device_index(device.index)
            return
        now: tuple[int, ...] = getattr(_cores, "now", ())
        if device.cores == now:
            return
        _cores.now = device.cores
        if max(1, len(now)) != device.threads:
            _devices.limit_threads(device)
        if len(device.cores) == 1:
            _devices.pin(device)
        elif len(now) == 1 and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, _devices.usable_cores())

    def _beckon(self, thread: int, place: int) -> None:
        """Let a thread that sleeps wake up on the core where it will compute.

        Where it was pinned before another may compute, which would keep it from going where it is
        waited for.
        """
        device = self._world.devices[place]
        if len(device.cores) == 1 and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, device.cores)

    # ---- training --------------------------------------------------------------------------------

    def _in_turn(self, work: _Work, microbatches: list[MicroBatch]) -> list[Any]:
        """One micro-batch after the other, in one thread."""

        def go() -> list[Any]:
            results = []
            for number in range(work.count):
                work.begin(number)
                microbatch = MicroBatch(number, self._occupy)
                microbatches.append(microbatch)
                with self._overlap.observing(microbatch, work.count):
                    results.append(self._compute(microbatch, work))
            return results

        if self._slots:
            return self._in_threads([go], work.count)[0]
        try:
            return go()
        finally:
            self._occupy(0)

    def _overlapped(self, work: _Work, microbatches: list[MicroBatch]) -> list[Any]:
        """Each micro-batch in a thread of its own; they wait for their turns."""
        overlap = self._overlap
        key = overlap.route, work.count
        if key not in self._orders:
            orders = orders_of(overlap.route, self.schedule(work.count), work.count)
            self._orders[key] = orders if self._slots else [merged(overlap.route, orders)]
        places = self._places if self._slots else [0] * len(self._places)
        turns = Turns(self._orders[key], places, self._beckon, work.count)
        microbatches += [
            MicroBatch(number, self._occupy, overlap.route, turns) for number in range(work.count)
        ]
        if not self._slots:
            self._give_queues(microbatches, states(overlap.accelerators) if overlap.draws else None)

        def go(microbatch: MicroBatch) -> Any:
            torch.set_autocast_cache_enabled(
                False
            )  # a weight's copy would belong to one micro-batch's graph
            with (
                contextlib.nullcontext()
                if microbatch.queues is None
                else microbatch.queues.streams()
            ):
                return self._compute(microbatch, work)

        functions = [functools.partial(go, microbatch) for microbatch in microbatches]
        with overlap.following(microbatches):
            return self._in_threads(functions, work.count, [turns.abort])

    def _compute(self, microbatch: MicroBatch, work: _Work) -> Any:
        # (Autograd's own threads, one for each accelerator, couldn't wait for turns.)
        with (
            torch.autograd.set_multithreading_enabled(self._slots),
            microbatch,
            self._told(microbatch),
        ):
            if microbatch.queues is not None:
                microbatch.queues.begin()
                if microbatch.queues.draws:
                    work.begin(microbatch.number)
            made = work.forward(microbatch.number)
            microbatch.turn_back()
            return work.backward(microbatch.number, made)

    def _give_queues(self, microbatches: Sequence[MicroBatch], random: States | None) -> None:
        """To micro-batches that overlap on accelerators; with random numbers of their own, if
        they draw any.
        """
        places = [device.torch for device in self._devices]
        computing = {place: torch.accelerator.current_stream(place) for place in places}
        for microbatch in microbatches:
            keys = [(place, microbatch.number % _COPYING) for place in computing]
            for key in keys:
                if key not in self._copying:
                    self._copying[key] = torch.Stream(key[0])
            copying = {key[0]: self._copying[key] for key in keys}
            microbatch.queues = CardQueues(places, computing, copying, random, self._shared)

    @contextlib.contextmanager
    def _told(self, microbatch: MicroBatch, what: str = ""):  # type: ignore[no-untyped-def]
        """Errors get a note that says where they came from."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, Aborted | InputError):
                stage = microbatch.stage or 0
                way = "forward" if microbatch.kind == "F" else "backward"
                what = what or f"{way} of micro-batch {microbatch.number}"
                error.add_note(
                    f"raised in stage {stage} ({self._devices[stage]}), {what}, at step "
                    f"{self._world.step}"
                )
            raise

    def _note(self, microbatches: Sequence[MicroBatch]) -> None:
        """An update is over: keep when its stages computed."""
        if self.timelines is None or not self._slots:  # (threads of accelerators only queue work)
            return
        spans: list[list[Span]] = [[] for _ in self._world.devices]
        for microbatch in microbatches:
            for visit, start, end in microbatch.stays:
                spans[self._places[visit.stage]].append(
                    Span(Action(*visit, microbatch.number), start, end)
                )
        self.timelines.append(
            Timeline(tuple(tuple(sorted(mine, key=lambda span: span.start)) for mine in spans))
        )
