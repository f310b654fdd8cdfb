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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch.world import World
from lockstep.pipelining.card_queues import CardQueues
from lockstep.pipelining.device_turns import Aborted, Turns
from lockstep.pipelining.microbatch import MicroBatch
from lockstep.pipelining.overlap import Overlap
from lockstep.pipelining.schedule import Key, Route, Schedule, is_forward_first, merged, orders_of
from lockstep.pipelining.stage_threads import StageThreads
from lockstep.tensors.seeding import states

T = TypeVar("T")

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
        threads: compute on the devices of the stages.
        on_abort: called where a micro-batch has failed, to free others that wait.
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
        self.on_abort: list[Callable[[], None]] = []
        self._world = world
        self._places = tuple(places)
        self._devices = [world.devices[place] for place in places]  # of each stage
        self.threads = StageThreads(world.devices, self._devices)
        self._is_on_slots = world.device.is_slot
        accelerators = [device.torch for device in self._devices if not device.is_slot]
        self._overlap = Overlap(model, world, len(places), accelerators)
        self._orders: dict[tuple[Route, int], list[list[Key]]] = {}
        self._copying = {
            place: [torch.Stream(place) for _ in range(_COPYING)] for place in {*accelerators}
        }
        self._shared: dict[int, torch.Tensor] = {}
        self._latest: list[MicroBatch] = []

    def run(self, work: Work) -> list[Any]:
        """Compute forward and backward of each micro-batch.

        Errors get a note that names the micro-batch and the stage.

        Returns:
            What each backward returned.
        """
        self.overlaps = work.count > 1 and self._overlap.allowed
        self.streamed = self.overlaps and self._is_on_slots and self._overlap.draws
        if self.overlaps:
            return self._overlapped(work)
        if self._is_on_slots:
            in_turn = functools.partial(self._in_turn, work)
            return self.threads.run([in_turn])[0]
        try:
            return self._in_turn(work)
        finally:
            self.threads.occupy(0)

    def computes_forwards_first(self, count: int) -> bool:
        """Return whether no backward of the next ``count`` micro-batches precedes a forward."""
        if count < 2:
            return count == 1
        return self._overlap.allowed and is_forward_first(self.schedule(count))

    # ---- the micro-batches of an update ----------------------------------------------------------

    def _microbatch(self, number: int, route: Route = (), turns: Turns | None = None) -> MicroBatch:
        return MicroBatch(number, self.threads.occupy, route, turns)

    def _in_turn(self, work: Work) -> list[Any]:
        """Compute one micro-batch after the other, in one thread."""
        results = []
        microbatches = []
        for number in range(work.count):
            work.begin(number)
            microbatch = self._microbatch(number)
            microbatches.append(microbatch)
            with self._overlap.observing(microbatch, work.count):
                results.append(self._compute(microbatch, work))
        self._latest = microbatches
        return results

    def _overlapped(self, work: Work) -> list[Any]:
        """Compute each micro-batch in a thread of its own; they wait for their turns."""
        route = self._overlap.route
        orders = self._orders_for(route, work.count)
        places = self._places
        if not self._is_on_slots:
            places = (0,) * len(places)  # there is one turn for all devices
        turns = Turns(orders, places, self.threads.beckon)
        microbatches = []
        functions = []
        for number in range(work.count):
            microbatch = self._microbatch(number, route, turns)
            microbatches.append(microbatch)
            functions.append(functools.partial(self._in_own_thread, microbatch, work))
        if not self._is_on_slots:
            self._give_queues(microbatches)
        self._overlap.begin()
        results = self.threads.run(functions, [turns.abort, *self.on_abort])
        self._overlap.end(microbatches)
        self._latest = microbatches
        return results

    def _orders_for(self, route: Route, count: int) -> list[list[Key]]:
        """Give the order of visits of each device, made once for a number of micro-batches.

        Args:
            route: of the micro-batches.
            count: how many there are.
        """
        key = route, count
        orders = self._orders.get(key)
        if orders is None:
            schedule = self.schedule(count)
            orders = orders_of(route, schedule, count)
            if not self._is_on_slots:
                orders = [merged(route, orders)]
            self._orders[key] = orders
        return orders

    def _in_own_thread(self, microbatch: MicroBatch, work: Work) -> Any:
        """Compute a micro-batch that overlaps with others; this thread has no other one."""
        # Else a weight's copy would belong to one micro-batch's graph.
        torch.set_autocast_cache_enabled(False)
        if microbatch.queues is None:
            return self._compute(microbatch, work)
        with microbatch.queues.streams():
            return self._compute(microbatch, work)

    def _compute(self, microbatch: MicroBatch, work: Work) -> Any:
        """Compute forward and backward of a micro-batch; return what backward returned."""
        # (Autograd's own threads, one for each accelerator, couldn't wait for turns.)
        in_threads = torch.autograd.set_multithreading_enabled(self._is_on_slots)
        queues = microbatch.queues
        with in_threads, microbatch, self._noted(microbatch):
            if queues is not None:
                queues.begin()
                if queues.draws:
                    work.begin(microbatch.number)
            made = work.forward(microbatch.number)
            microbatch.turn_back()
            return work.backward(microbatch.number, made)

    def _give_queues(self, microbatches: Sequence[MicroBatch]) -> None:
        """Let micro-batches overlap on accelerators, with random numbers of their own if they draw
        any.
        """
        random = None
        if self._overlap.draws:
            random = states(self._overlap.accelerators)
        places = [device.torch for device in self._devices]
        computing = {place: torch.accelerator.current_stream(place) for place in places}
        for microbatch in microbatches:
            number = microbatch.number % _COPYING
            copying = {place: streams[number] for place, streams in self._copying.items()}
            microbatch.queues = CardQueues(places, computing, copying, random, self._shared)

    # ---- errors and times ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _noted(self, microbatch: MicroBatch) -> Iterator[None]:
        """Give errors of a micro-batch a note that says where they came from."""
        try:
            yield
        except (Aborted, InputError):
            raise
        except Exception as error:
            stage = microbatch.stage or 0
            device = self._devices[stage]
            what = f"{microbatch.direction} of micro-batch {microbatch.number}"
            step = self._world.step
            error.add_note(f"raised in stage {stage} ({device}), {what}, at step {step}")
            raise

    @property
    def busy(self) -> list[float]:
        """Give the seconds that each device computed in the last update; none on accelerators,
        whose threads only queue work.
        """
        if not self._is_on_slots or not self._latest:
            return []
        seconds = [0.0] * len(self._world.devices)
        for microbatch in self._latest:
            for visit, start, end in microbatch.stays:
                seconds[self._places[visit.stage]] += end - start
        return seconds
