"""Looks at variables wherever a forward calls a function or a layer: a person's own code, or by such code."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.errors import is_own_code
from lockstep.model.inspection.code_names import PLAIN

_CALLS, _LOOKS, _ITEMS = 50_000, 400, 2000
"""Calls, and looks, at most; and items of a variable up to which all that it holds is known, not only its own items."""


@contextmanager
def at_own_calls(look: Callable[[], None], watched: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Call ``look`` as such a call begins by which what is ``watched`` isn't what it was in any call before.

    By ``sys.setprofile``; where a profiler has that, by ``sys.settrace``.
    """
    large = set[int]()  # the ids of variables that hold more

    def mark(value: Any) -> Any:
        try:
            return _mark(value, itertools.count(1), deep=1 if id(value) in large else 6)
        except _IsLarge:
            large.add(id(value))
            return mark(value)

    def marks() -> tuple[Any, ...]:
        return tuple(map(mark, watched()))

    seen, left = {marks()}, itertools.count(_CALLS, -1)

    def called(frame: types.FrameType, event: str, argument: Any) -> None:
        if not event.endswith("call") or not (_is_own(frame) or (event == "call" and _is_own(frame.f_back))):
            return
        if next(left) > 0 and len(seen) <= _LOOKS and (now := marks()) not in seen:
            seen.add(now)
            look()

    is_free = sys.getprofile() is None
    put: Callable[[Any], None] = sys.setprofile if is_free else sys.settrace
    before = None if is_free else sys.gettrace()
    put(called)
    try:
        yield
    finally:
        put(before)


_is_own_file = functools.lru_cache(is_own_code)


def _is_own(frame: types.FrameType | None) -> bool:
    return frame is not None and _is_own_file(frame.f_code.co_filename)


class _IsLarge(Exception):
    pass


def _mark(value: Any, number: Iterator[int], deep: int) -> Any:
    """What tells at a glance whether a value is another one: which objects it holds, how often they were written.

    Of numpy's arrays, and what lies deeper where that is 6 deep, it is never the same.
    """
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (*PLAIN, type, types.FunctionType, types.ModuleType, torch.nn.Module)):
        return id(value)
    if type(value).__module__.partition(".")[0] == "numpy":
        return object()
    held = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(held, list | tuple | set | deque):
        attributes = getattr(value, "__dict__", None)
        held = [*(attributes.values() if isinstance(attributes, dict) else ()), *slots_of(value).values()]
    if deep == 1:
        return id(value), tuple(map(id, held))
    if next(number) + len(held) > _ITEMS:
        raise _IsLarge
    return id(value), tuple(_mark(item, number, deep - 1) for item in held)


_NO_SLOTS = ("__dict__", "__weakref__")


def slots_of(value: Any) -> dict[str, Any]:
    """What is in the ``__slots__`` of its classes, by the names that attributes have."""
    given = [(kind, vars(kind).get("__slots__", ())) for kind in type(value).__mro__]
    named = [(kind, name) for kind, names in given for name in ([names] if isinstance(names, str) else names)]
    mangled = [
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for kind, name in named
    ]
    return {name: getattr(value, name) for name in mangled if hasattr(value, name) and name not in _NO_SLOTS}
