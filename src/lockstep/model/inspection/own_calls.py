"""Looks at something wherever a forward calls a function, or a layer, of a person's own code."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.errors import is_own_code

_MOST = 400
"""Looks at most."""

_EACH = 3
"""Looks at most where a line calls a function again and again, or a layer is called so."""


@contextmanager
def at_own_calls(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` as each such call begins, by ``sys.setprofile``; where a profiler has that, by ``sys.settrace``."""
    seen, left = Counter[Any](), itertools.count(_MOST, -1)

    def called(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_own(frame.f_code.co_filename):
            place = _place(frame)
            seen[place] += 1
            if seen[place] <= _EACH and next(left) > 0:
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


def _place(frame: types.FrameType) -> tuple[Any, ...]:
    """The function and the object that it is a method of, and the line of the person's own code that calls it."""
    code = frame.f_code
    caller = frame.f_back
    while caller is not None and not _is_own(caller.f_code.co_filename):
        caller = caller.f_back
    of = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_varnames else None
    return code, id(of) if isinstance(of, nn.Module) else 0, caller and (caller.f_code, caller.f_lineno)
