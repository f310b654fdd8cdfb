"""The methods that a profile replaces, on their objects and for a while, by ones that look at the clock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lockstep.launch.world import World, now
from lockstep.pipelining.runner import Runner
from lockstep.profiling.clock import Clock
from lockstep.strategies.step import Step
from lockstep.threads.replica_collectives import Session

_COMPUTING = {"forward_loss": "forward and loss", "backward": "backward", "_weight": "weight", "clip": "clip"}
_COLLECTIVES = ("all_reduce", "broadcast", "broadcast_object", "gather_objects")

Function = Callable[..., Any]


class Methods:
    """Those of a step, its optimizer and its world.

    Args:
        step: with the strategy's own methods in ``profiled``.
        clock: what they look at.

    Attributes:
        runner: of a step whose layers take turns, which notes them meanwhile; None elsewhere.
    """

    def __init__(self, step: Step, clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._undo: list[Callable[[], None]] = []
        self.runner: Runner | None = getattr(step, "runner", None)
        self._sums = False  # whether the next backward sums over the ranks

    def replace(self) -> None:
        """They look at the clock from now on."""
        step, world = self._step, self._step.world
        if world.size > 1:
            self._put(step, "backward", self._that_may_sum)
            if hasattr(step, "_forward"):
                self._put(step, "_forward", self._that_finds_a_reducer)
            for name in _COLLECTIVES:
                self._put(world, name, functools.partial(self._in_collective, name))
        for name, words in _COMPUTING.items():
            self._put(step, name, functools.partial(self._in_phase, "computing", words))
        self._put(step.optimizer, "step", functools.partial(self._in_phase, "computing", "optimizer"))
        for name, words in step.profiled.items():
            moving = functools.partial(self._in_phase, "communicating", words)
            self._put(step, name, {"replica": self._of_replica, "stages": self._of_stages}.get(words, moving))
        exchange = getattr(step, "_exchange", None)
        if self.runner is not None:
            self.runner.timelines = []
        if exchange is not None:
            self._put(exchange, "session", lambda session: lambda: _ClockedSession(session(), self._clock))

    def put_back(self) -> None:
        """They are as they were."""
        if self.runner is not None:
            self.runner.timelines = None
        while self._undo:
            self._undo.pop()()

    def _put(self, thing: Any, name: str, around: Callable[[Function], Function]) -> None:
        own = vars(thing)
        before: Callable[[], None] = (
            functools.partial(setattr, thing, name, own[name])
            if name in own
            else functools.partial(delattr, thing, name)
        )
        setattr(thing, name, around(getattr(thing, name)))
        self._undo.append(before)

    def _in_phase(self, kind: Any, words: str, function: Function) -> Function:
        return _within(lambda *args, **named: self._clock.phase(kind, words), function)

    def _of_replica(self, function: Function) -> Function:
        return _within(lambda number, *args, **named: self._clock.replica(number), function)

    def _of_stages(self, function: Function) -> Function:
        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            began = now()
            result = function(*args)
            if self.runner is not None and self.runner.timelines:
                self._clock.stages(now() - began, self.runner.timelines[-1].busy)
            return result

        return timed

    def _in_collective(self, name: str, function: Function) -> Function:
        world: World = self._step.world

        def collective(*args: Any, group: Any = None, **named: Any) -> AbstractContextManager[None]:
            return self._clock.collective(name, world.size if group is None else dist.get_world_size(group))

        return _within(collective, function)

    def _that_finds_a_reducer(self, forward: Function) -> Function:
        @functools.wraps(forward)
        def finding(model: Any, *args: Any, **named: Any) -> Any:
            self._sums = isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
            return forward(model, *args, **named)

        return finding

    def _that_may_sum(self, backward: Function) -> Function:
        """PyTorch's reducer sums while backward runs. What is left when backward's own work is done counts as a
        collective: the reducer waits for it in a callback at the end of backward, and one that was asked for before the
        reducer's runs before it.
        """

        @functools.wraps(backward)
        def summing(total: torch.Tensor, *args: Any, **named: Any) -> Any:
            if not (self._sums and total.requires_grad):
                return backward(total, *args, **named)
            computed: list[float] = []

            def note() -> None:
                if not self._step.world.device.is_slot:
                    torch.accelerator.current_stream().synchronize()
                computed.append(now())

            def begun(gradient: torch.Tensor) -> None:
                Variable._execution_engine.queue_callback(note)

            hook = total.register_hook(begun)  # type: ignore[no-untyped-call]
            result = backward(total, *args, **named)
            hook.remove()
            if computed:
                self._clock.wait()
                self._clock.was_in("reduce", self._step.world.size, computed[0])
                self._clock.overlaps = True
            return result

        return summing


def _within(around: Callable[..., AbstractContextManager[None]], function: Function) -> Function:
    """``function`` inside of the context that ``around`` gives for its arguments."""

    @functools.wraps(function)
    def timed(*args: Any, **named: Any) -> Any:
        with around(*args, **named):
            return function(*args, **named)

    return timed


class _ClockedSession:
    """A place in a micro-batch whose exchanges are noted."""

    def __init__(self, session: Session, clock: Clock) -> None:
        self._session = session
        self._clock = clock

    @property
    def parties(self) -> int:
        return self._session.parties

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._clock.collective("batch norm", self.parties):
            return self._session.gather(tensor)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._clock.collective("batch norm", self.parties):
            return self._session.sum(tensor)
