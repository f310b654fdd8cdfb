"""Observer: the hooks of a training, for whoever wants to know what happens in its updates.

A profile, ``verify`` and the first step's shapes are observers. `World.observers` is the list of
them. Nearly always it is empty, and costs nothing then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["computing", "communicating", "waiting", "loading", "other"]
"""What the time of a phase is spent on."""

_Context = AbstractContextManager[None]
_NOTHING = contextlib.nullcontext()


class Observer:
    """Looks at updates. Each method does nothing here; threads of replicas and stages call them
    at the same time.
    """

    def phase(self, kind: Kind, words: str) -> _Context:
        """Around a part of an update, which ``words`` name."""
        return _NOTHING

    def replica(self, number: int) -> _Context:
        """Around all that a replica's thread does in an update."""
        return _NOTHING

    def stages(self) -> _Context:
        """Around the turns of all stages, for which this thread waits."""
        return _NOTHING

    def microbatch(self, number: int) -> _Context:
        """Around the begin of a micro-batch, which is given a random stream of its own."""
        return _NOTHING

    def forwarded(self, where: str, part: Any, outputs: Any) -> None:
        """A part of a batch has gone through the model.

        Args:
            where: which replica computed it; "" in a process that has one.
            part: a ``Part``, with its inputs and targets.
            outputs: what the model gave.
        """

    def backward(self, total: Any, *, sums: bool) -> _Context:
        """Around backward from ``total``; ``sums`` where PyTorch's reducer sums gradients over
        the ranks meanwhile.
        """
        return _NOTHING

    def gradients_ready(self) -> None:
        """The gradients of the global batch are in each ``parameter.grad``; clipping and the
        optimizer come next.
        """


def observed(around: Callable[..., _Context]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a method of an object that has ``observers``: it runs in the context that each of them
    gives.

    Args:
        around: called with an observer and the arguments of the method (``self`` first).
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **named: P.kwargs) -> R:
            observers: list[Observer] = args[0].observers  # type: ignore[attr-defined]
            if not observers:
                return function(*args, **named)
            with contextlib.ExitStack() as stack:
                for observer in observers:
                    stack.enter_context(around(observer, *args, **named))
                return function(*args, **named)

        return run

    return mark


def phase(kind: Kind, words: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a method as a part of an update: observers are called for it, a profile names it."""
    return observed(lambda observer, *args, **named: observer.phase(kind, words))
