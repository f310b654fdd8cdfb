"""Looks at variables wherever a forward calls a function or a layer: a person's own code, or by
such code.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from lockstep.errors import is_own_code
from lockstep.model.inspection.code_names import PLAIN

_SECONDS, _LOOKS = 2.0, 400
"""How long, and how often, it is looked at most."""

_ITEMS, _EACH = 5000, 500
"""Items of a variable, and of a container in it, up to which it is known what they hold, not
only which they are.
"""

_BYTES = 4096
"""Those of an array up to which it is known what it holds."""


@contextmanager
def at_own_calls(look: Callable[[], None], watched: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Call ``look`` as such a call begins by which what is ``watched`` isn't what it was in any
    call before.

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

    seen, spent = {marks()}, 0.0

    def called(frame: types.FrameType, event: str, argument: Any) -> None:
        if not event.endswith("call") or not (
            _is_own(frame) or (event == "call" and _is_own(frame.f_back))
        ):
            return
        nonlocal spent
        if spent > _SECONDS or len(seen) > _LOOKS:
            return
        began = time.perf_counter()
        if (now := marks()) not in seen:
            seen.add(now)
            look()
        spent += time.perf_counter() - began

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
    """What tells at a glance whether a value is another one: which objects it holds, how often they
    were written.

    Of what lies deepest, and in large containers, it says which objects they are.
    """
    if next(number) > _ITEMS:
        raise _IsLarge
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (*PLAIN, type, types.FunctionType, types.ModuleType, torch.nn.Module)):
        return id(value)
    if isinstance(value, numpy.ndarray):
        return id(value), value.tobytes() if value.nbytes <= _BYTES else 0
    items: Any = value.values() if isinstance(value, dict) else value
    held = list(items) if isinstance(value, dict | list | tuple | set | deque) else []
    if type(value) not in (dict, list, tuple, set, deque):
        attributes = getattr(value, "__dict__", None)
        held += [
            *(attributes.values() if isinstance(attributes, dict) else ()),
            *slots_of(value).values(),
        ]
    if deep == 1 or len(held) > _EACH:
        return id(value), tuple(map(id, held))
    return id(value), tuple(_mark(item, number, deep - 1) for item in held)


_NO_SLOTS = ("__dict__", "__weakref__")


def slots_of(value: Any) -> dict[str, Any]:
    """What is in the ``__slots__`` of its classes, by the names that attributes have."""
    given = [(kind, vars(kind).get("__slots__", ())) for kind in type(value).__mro__]
    named = [
        (kind, name)
        for kind, names in given
        for name in ([names] if isinstance(names, str) else names)
    ]
    mangled = [
        f"_{kind.__name__.lstrip('_')}{name}"
        if name.startswith("__") and not name.endswith("__")
        else name
        for kind, name in named
    ]
    return {
        name: getattr(value, name)
        for name in mangled
        if hasattr(value, name) and name not in _NO_SLOTS
    }
