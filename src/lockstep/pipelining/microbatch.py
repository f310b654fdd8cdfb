"""Flight: one micro-batch on its way through the stages, forward and back.

The model's forward is ordinary Python in this micro-batch's thread. Hooks on the modules tell the
flight which stage computes next; it gives up its turn on one and waits for its turn on the other::

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
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lockstep.errors import StrategyError
from lockstep.pipelining.card_queues import CardQueues
from lockstep.pipelining.schedule import Key, Route, Visit
from lockstep.pipelining.turns import Stuck, Turns
from lockstep.tensors.pytree import tensors

_here = threading.local()

_MET = (
    "micro-batches that overlap have got hold of one another's tensors, by way of a hook, an "
    "attribute or a global "
    "that forward changed while another was under way: keep them in forward's own variables, or "
    "take mp"
)

_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that this thread's next node of the graph will have."""


def current() -> Flight | None:
    """The flight of this thread, or None."""
    return getattr(_here, "flight", None)


@dataclass(eq=False)
class Flight:
    """One micro-batch on its way."""

    number: int
    occupy: Callable[[int], None]  # called with a stage that begins to compute in this thread
    route: Route = ()  # where it is expected to go; empty where that isn't known yet
    turns: Turns | None = None  # what to wait for; None is for one that goes alone
    marks: bool = True  # whether backward has to know where it is
    queues: CardQueues | None = None  # on accelerators, where it overlaps with others
    stage: int | None = None  # where it computes
    kind: Literal["F", "B"] = "F"  # on its way forward, or back
    seen: list[Visit] = field(default_factory=list)  # where it has been
    stays: list[tuple[Visit, float, float]] = field(
        default_factory=list
    )  # when each visit began and ended, in seconds
    strayed: bool = False  # whether it went where it was not expected
    crossed: Callable[[], None] | None = None  # called where it leaves a stage, if it is observed
    # The module that was called and is on this stage with all that is in it; hooks inside have
    # nothing to do.
    outer: torch.nn.Module | None = None
    _since: float = 0.0
    _at: int = 0  # the next visit of the route
    _starts: list[int] = field(
        default_factory=list
    )  # the number of the first node of each visit of the forward
    _stages: list[int] = field(default_factory=list)  # and its stage
    _marked: set[int] = field(default_factory=set)

    def __enter__(self) -> Flight:
        """Begin, with the turn of the first stage: the model's own code before any layer is in
        order too.
        """
        if self.route:
            self.enter(self.route[0].stage)
        _here.flight = self
        return self

    def __exit__(self, *error: object) -> None:
        """Arrived: what was expected of it otherwise will not come."""
        _here.flight = None
        if self.queues is not None:
            self.queues.close()
        self._leave()
        self._skip_to(len(self.route))
        if (
            self.turns is not None and error[0] is None
        ):  # where one fails, that is what all are freed with
            self.turns.arrive()

    def turn_back(self) -> None:
        """The forward and its loss are done: backward is to begin where they ended."""
        last = self.stage or 0
        self._leave()
        self.kind = "B"
        self.enter(last)

    def enter(self, stage: int) -> None:
        """Compute on this stage from now on; waits for its turn."""
        if stage == self.stage:
            return
        self._leave()
        visit = Visit(stage, self.kind)
        if self.turns is not None:
            place = next(
                (i for i in range(self._at, len(self.route)) if self.route[i] == visit), None
            )
            if place is None:
                self.strayed = True
            else:
                self._skip_to(place)
                self._at = place + 1
            self._take(self.turns, stage, None if place is None else (place, self.number))
        self.stage = stage
        self.occupy(stage)
        if self.queues is not None:
            self.queues.enter(stage)
        self.seen.append(visit)
        self._since = time.perf_counter()
        if self.kind == "F":
            self._starts.append(_number())
            self._stages.append(stage)

    def _take(self, turns: Turns, stage: int, key: Key | None) -> None:
        try:
            turns.take(stage, key)
        except Stuck as error:
            way = "forward" if self.kind == "F" else "backward"
            raise StrategyError(
                f"stage {stage}, {way} of micro-batch {self.number}: it waits for its turn, and "
                "all others that are "
                f"under way wait for theirs, so none would ever come: {_MET}"
            ) from error

    def come_back(self, stage: int) -> None:
        """Backward has come to what was made on this stage.

        Raises:
            StrategyError: it is that of another micro-batch, which has turns of its own.
        """
        here = current()
        if here is not None and here is not self and self.turns is not None:
            raise StrategyError(
                f"stage {stage}, backward of micro-batch {here.number}: it came to what "
                f"micro-batch {self.number} has "
                f"computed: {_MET}"
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
        if self.turns is not None:
            self.turns.leave(self.stage)
        self.stage = None

    def _skip_to(self, place: int) -> None:
        if self.turns is not None:
            for i in range(self._at, place):
                self.turns.skip(self.route[i].stage, [(i, self.number)])

    def mark(self, nest: Any) -> None:
        """Let the backward of what was made so far take the turn of the stage where it was made."""
        with torch._C.DisableTorchFunction():  # none of this is a use of the tensors
            for tensor in tensors(nest):
                if tensor.requires_grad:
                    # A view that is written to later leaves its own node behind, but not its
                    # base's.
                    for one in (tensor, tensor._base) if tensor._is_view() else (tensor,):
                        if one is not None and (node := one.grad_fn) is not None:
                            self._mark(node)

    def _mark(self, node: Any) -> None:
        number = node._sequence_nr()
        visit = bisect_right(self._starts, number) - 1
        if visit < 0 or number in self._marked:
            return
        self._marked.add(number)
        stage = self._stages[visit]
        node.register_prehook(lambda gradients: self.come_back(stage))
