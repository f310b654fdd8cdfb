"""Looks at variables wherever a forward calls a function, or a layer, of a person's own code."""

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

_CALLS, _LOOKS, _ITEMS = 50_000, 400, 1000
"""Calls, and looks, at most; and the items of a container up to which each is looked at."""


@contextmanager
def at_own_calls(look: Callable[[], None], watched: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Call ``look`` as such a call begins by which what is ``watched`` isn't what it was in any call before.

    By ``sys.setprofile``; where a profiler has that, by ``sys.settrace``.
    """

    def marks() -> tuple[Any, ...]:
        return tuple(map(_mark, watched()))

    seen, left = {marks()}, itertools.count(_CALLS, -1)

    def called(frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _is_own(frame.f_code.co_filename) or next(left) <= 0 or len(seen) > _LOOKS:
            return
        if (now := marks()) not in seen:
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


_is_own = functools.lru_cache(is_own_code)


def _mark(value: Any, deep: int = 6) -> Any:
    """What tells at a glance whether a value is another one: which objects it holds, how often they were written.

    Of what lies deeper, large containers and numpy's arrays, it is never the same.
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
    if held and (not deep or len(held) > _ITEMS):
        return object()
    return id(value), tuple(_mark(item, deep - 1) for item in held)


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
