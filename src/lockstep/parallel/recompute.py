"""Recompute: activation checkpointing that draws the same numbers again, in threads with random streams of their own.

``torch.utils.checkpoint`` saves and restores the state of PyTorch's generator, which is not what a thread inside
`lockstep.parallel.random.stream` draws from; and the autograd engine runs a recomputation without the thread's function
modes. So dropout inside a checkpoint would get another mask the second time, silently, and gradients would be wrong.

``install`` wraps the two functions of PyTorch through which its checkpoints go. Outside of a stream they do what they
did. (torch 2.11 to 2.13; to be deleted when a checkpoint can be told of a generator.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as _checkpoint

from lockstep.parallel import random

_installed = False


def install() -> None:
    """Make PyTorch's checkpoints replay the calling thread's stream, once for this process."""
    global _installed
    if _installed:
        return
    _installed = True
    without_reentrance = _checkpoint._checkpoint_without_reentrant_generator
    apply = _checkpoint.CheckpointFunction.apply

    def replaying_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Here the first run of the function is not by this name: every call is a recomputation.
        return without_reentrance(_replaying(function, is_first=False), *args, **kwargs)

    def replaying_apply(function: Callable[..., Any], *args: Any) -> Any:
        return apply(_replaying(function, is_first=True), *args)  # type: ignore[no-untyped-call]

    _checkpoint._checkpoint_without_reentrant_generator = replaying_generator  # type: ignore[assignment]
    _checkpoint.CheckpointFunction.apply = replaying_apply  # type: ignore[method-assign]


def _replaying(function: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
    """The function, which draws in each later run what it draws now."""
    generator = random.current()
    if generator is None:
        return function
    start = generator.get_state()
    waiting = [True] if is_first else []

    def run(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.clear()
            return function(*args, **kwargs)
        now = generator.get_state()
        generator.set_state(start)
        try:
            with random.stream(generator):
                return function(*args, **kwargs)
        finally:
            generator.set_state(now)

    return run
