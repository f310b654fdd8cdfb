"""A micro-batch on its way through the stages, forward and back.

The model's forward is ordinary Python in this micro-batch's thread. Hooks on the modules tell it
which stage computes next; it gives up its turn on one and waits for its turn on the other::

    forward      stem ─▶ layer1 ─▶ layer2 ─▶ loss          which stage: by the module that is called
                 0F              1F
    backward     stem ◀─ layer1 ◀─ layer2 ◀─               by the node of autograd's graph that runs
                 0B              1B

Backward needs no cut in the graph. Autograd runs a thread's nodes on CPU strictly in the reverse of
the order in which they were made, which their numbers tell: so all nodes of one visit come
together, and a hook before the last of them that anybody uses (what a module gave, what a module of
another stage was given) takes its turn for the whole visit.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch

from lockstep.errors import StrategyError
from lockstep.pipelining.card_queues import CardQueues
from lockstep.pipelining.device_turns import Turns
from lockstep.pipelining.schedule import Key, Kind, Route, Visit
from lockstep.tensors.pytree import tensors

_here = threading.local()

_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that this thread's next node of the graph will have."""


def current() -> MicroBatch | None:
    """Give the micro-batch of this thread, or None."""
    return getattr(_here, "microbatch", None)


class MicroBatch:
    """One micro-batch on its way.

    Args:
        number: from 0.
        occupy: called with a stage that begins to compute in this thread.
        route: where it is expected to go; empty where that isn't known yet.
        turns: what to wait for; None is for one that goes alone.

    Attributes:
        queues: on accelerators, where it overlaps with others.
        stage: where it computes.
        kind: whether it is on its way forward, or back.
        seen: where it has been.
        stays: when each visit began and ended, in seconds.
        strayed: whether it went where it was not expected.
        crossed: called where it leaves a stage, if it is observed.
        outer: the module that was called and is on this stage with all that is in it; hooks inside
            have nothing to do.
    """

    def __init__(
        self,
        number: int,
        occupy: Callable[[int], None],
        route: Route,
        turns: Turns | None,
    ) -> None:
        self.number = number
        self.route = route
        self.queues: CardQueues | None = None
        self.stage: int | None = None
        self.kind: Kind = "F"
        self.seen: list[Visit] = []
        self.stays: list[tuple[Visit, float, float]] = []
        self.strayed = False
        self.crossed: Callable[[], None] | None = None
        self.outer: torch.nn.Module | None = None
        self._occupy = occupy
        self._turns = turns
        self._since = 0.0
        self._last = 0  # where forward ended
        self._next = 0  # the next visit of the route
        self._starts: list[int] = []  # the number of the first node of each visit of the forward
        self._stages: list[int] = []  # and its stage
        self._marked: set[int] = set()

    def __enter__(self) -> MicroBatch:
        """Begin, with the turn of the first stage: the model's own code before any layer is in
        order too.
        """
        if self.route:
            self.enter(self.route[0].stage)
        _here.microbatch = self
        return self

    def __exit__(self, *error: object) -> None:
        """Arrived: what was expected of it otherwise will not come."""
        _here.microbatch = None
        if self.queues is not None:
            self.queues.close()
        self._leave()
        self._skip_to(len(self.route))

    def end_forward(self) -> None:
        """Give up the last turn of forward: a loss waits for other micro-batches without one."""
        self._last = self.stage or 0
        self._leave()
        self.kind = "B"
        forwards = [visit.kind for visit in self.route].count("F")
        self._skip_to(forwards)
        self._next = forwards

    def turn_back(self) -> None:
        """End forward and loss: backward is to begin where they ended."""
        if self.kind == "F":
            self.end_forward()
        self.enter(self._last)

    def enter(self, stage: int) -> None:
        """Compute on this stage from now on; waits for its turn."""
        if stage == self.stage:
            return
        self._leave()
        visit = Visit(stage, self.kind)
        if self._turns is not None:
            self._wait(self._turns, visit)
        self.stage = stage
        self._occupy(stage)
        if self.queues is not None:
            self.queues.enter(stage)
        self.seen.append(visit)
        self._since = time.perf_counter()
        if self.kind == "F":
            self._starts.append(_number())
            self._stages.append(stage)

    def _wait(self, turns: Turns, visit: Visit) -> None:
        """Wait for the turn of a visit, which is one of the route's, or of no list."""
        key: Key | None = None
        try:
            place = self.route.index(visit, self._next)
        except ValueError:
            self.strayed = True
        else:
            key = place, self.number
            self._skip_to(place)
            self._next = place + 1
        turns.take(visit.stage, key)

    @property
    def direction(self) -> str:
        """``forward`` or ``backward``."""
        return "forward" if self.kind == "F" else "backward"

    def come_back(self, stage: int) -> None:
        """Take a stage, as backward comes to what was made there.

        Raises:
            StrategyError: it is that of another micro-batch, which has turns of its own.
        """
        here = current()
        if here is not None and here is not self and self._turns is not None:
            raise StrategyError(
                f"stage {stage}, backward of micro-batch {here.number}: backward reached tensors "
                f"of micro-batch {self.number} through a hook, an attribute or a global that "
                "forward changed while micro-batches overlapped: keep tensors in local "
                "variables of forward, or take mp"
            )
        self.enter(stage)

    def _leave(self) -> None:
        if self.stage is None:
            return
        if self.crossed is not None:
            self.crossed()
        self.stays.append((self.seen[-1], self._since, time.perf_counter()))
        if self.queues is not None:
            self.queues.leave(self.stage)
        if self._turns is not None:
            self._turns.leave(self.stage)
        self.stage = None

    def _skip_to(self, place: int) -> None:
        if self._turns is None:
            return
        for i in range(self._next, place):
            self._turns.skip(self.route[i].stage, (i, self.number))

    def mark(self, nest: Any) -> None:
        """Let the backward of what was made so far take the turn of the stage where it was made."""
        with torch._C.DisableTorchFunction():  # none of this is a use of the tensors
            for tensor in tensors(nest):
                if not tensor.requires_grad:
                    continue
                self._mark(tensor.grad_fn)
                # A view that is written to later leaves its own node behind, but not its base's.
                if tensor._is_view() and tensor._base is not None:
                    self._mark(tensor._base.grad_fn)

    def _mark(self, node: Any) -> None:
        if node is None:
            return
        number = node._sequence_nr()
        visit = bisect_right(self._starts, number) - 1
        if visit < 0 or number in self._marked:
            return
        self._marked.add(number)
        stage = self._stages[visit]
        node.register_prehook(lambda gradients: self.come_back(stage))
