"""Small values: what is small in an object, by where it is, to see what callbacks and calls have changed there."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lockstep.tensors.digest import digest

_SMALL = 1000
"""Items, or elements of a tensor, up to which they are looked at one by one."""


def small_in(path: str, value: Any, seen: set[int], depth: int = 6) -> Iterator[tuple[str, Any]]:
    """What is small in an object, by where it is; what ``repr`` shows of it is all that it is."""
    if isinstance(value, int | float | complex | str | None):
        yield path, value
        return
    if id(value) in seen or not depth or isinstance(value, type | types.ModuleType | types.FunctionType):
        return
    seen.add(id(value))
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, torch.Tensor):
        if value.numel() <= _SMALL and value.layout == torch.strided and not value.is_meta:
            yield path, (tuple(value.shape), digest(value))
    elif hasattr(value, "tolist") and getattr(value, "size", _SMALL + 1) <= _SMALL:  # an array of numpy
        yield path, value.tolist()
    elif isinstance(value, dict):
        inner = ((f"{path}[{key!r}]", one) for key, one in value.items()) if len(value) <= _SMALL else ()
    elif isinstance(value, list | tuple | deque):
        inner = ((f"{path}[{number}]", one) for number, one in enumerate(value)) if len(value) <= _SMALL else ()
    elif hasattr(value, "__dict__") and not _is_of_python(type(value)):
        inner = ((f"{path}.{key}", one) for key, one in vars(value).items())
    for where, one in list(inner):
        yield from small_in(where, one, seen, depth - 1)


def _is_of_python(kind: type) -> bool:
    """Whether it is a class of the standard library that holds more than it is given: a logger, an executor."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"types", "argparse", "collections"}
