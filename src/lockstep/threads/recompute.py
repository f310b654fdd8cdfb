"""Recompute: activation checkpointing that draws the same numbers again, in threads with random
streams of their own.

``torch.utils.checkpoint`` saves and restores the state of PyTorch's generator, which is not what a
thread inside `lockstep.threads.random_streams.stream` draws from; and the autograd engine runs a
recomputation without the thread's function modes. So dropout inside a checkpoint would get another
mask the second time, silently, and gradients would be wrong.

``install`` wraps the two functions of PyTorch through which its checkpoints go. Outside of a stream
they do what they did, unless somebody else has to see to what a recomputation runs in, as stages on
several accelerators do. (torch 2.11 to 2.14; to be deleted when a checkpoint can be told of a
generator.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as _checkpoint

from lockstep.threads import random_streams

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Later = Callable[[], Context | None]

_installed = False
_checkpoints = 0
_asked: list[Later] = []


def install(later: Later | None = None) -> None:
    """Make PyTorch's checkpoints replay the calling thread's stream, once for this process.

    Args:
        later: asked when a checkpoint begins; gives what it is to be computed again in, or None.
    """
    global _installed
    if later is not None and later not in _asked:
        _asked.append(later)
    if _installed:
        return
    _installed = True
    apply = _checkpoint.CheckpointFunction.apply

    def replaying_apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        preserves = preserves and not _is_replayed(args)
        return apply(_replaying(function, is_first=True), preserves, *args)  # type: ignore[no-untyped-call]

    _checkpoint.CheckpointFunction.apply = replaying_apply  # type: ignore[method-assign]
    name = "_checkpoint_without_reentrant_generator"
    replaying: Callable[..., Any] = _replaying_generator
    if hasattr(_checkpoint, f"{name}_impl"):  # since torch 2.14
        name += "_impl"
        replaying = _replaying_with_lists
    setattr(_checkpoint, name, functools.partial(replaying, getattr(_checkpoint, name)))


def _replaying_generator(
    generator: Callable[..., Any],
    function: Callable[..., Any],
    preserves: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Begin a checkpoint that isn't reentrant; its later runs draw what the first one draws."""
    # Here the first run of the function is not by this name: every call is a recomputation.
    preserves = preserves and not _is_replayed(args)
    return generator(_replaying(function, is_first=False), preserves, *args, **kwargs)


def _replaying_with_lists(
    generator: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
    **settings: Any,
) -> Any:
    """Begin a checkpoint, as ``_replaying_generator``, whose arguments are a tuple and a dict."""
    preserves = preserve_rng_state and not _is_replayed(args)
    function = _replaying(function, is_first=False)
    return generator(function, args, kwargs, preserve_rng_state=preserves, **settings)


def checkpoints() -> int:
    """Count the checkpoints that have begun since they were made to replay."""
    return _checkpoints


def _is_replayed(args: tuple[Any, ...]) -> bool:
    """Return whether all that is drawn comes from the thread's stream, not from PyTorch's
    generators.

    The state of the one of the CPU, which threads share, must not be read then: where the garbage
    collector runs meanwhile, and another thread sets the state, each waits for what the other holds
    (torch 2.13).
    """
    on_cpu = all(arg.device.type == "cpu" for arg in args if isinstance(arg, torch.Tensor))
    return on_cpu and random_streams.current() is not None


def _replaying(function: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
    """Make of a function one that draws in each later run what it draws now."""
    global _checkpoints
    _checkpoints += 1
    around = [again for again in (ask() for ask in _asked) if again is not None]
    generator = random_streams.current()
    if generator is not None:
        around.append(_stream_again(generator))
    if not around:
        return function
    is_recomputing = not is_first

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_recomputing
        if not is_recomputing:
            is_recomputing = True
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for again in around:
                stack.enter_context(again())
            return function(*args, **kwargs)

    return run


def _stream_again(generator: torch.Generator) -> Context:
    """Give a function that makes contexts in which the thread's stream is as it is now."""
    start = generator.get_state()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = generator.get_state()
        generator.set_state(start)
        try:
            with random_streams.stream(generator):
                yield
        finally:
            generator.set_state(now)

    return again
