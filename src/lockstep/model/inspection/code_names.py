"""Values are pickled to be hashed: functions and classes by what tells them from others, since not
all can be imported.

(In ranks, those of the script itself can't.)
"""

from __future__ import annotations

import hashlib
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.launch.processes.call import closed_over
from lockstep.tensors.digest import digest

PLAIN = (bool, int, float, complex, str, type(None))


class CodeByName(pickle.Pickler):
    """(A class within a function would hold what that closes over, a copy of the model, until
    garbage is collected.)
    """

    def persistent_id(self, held: Any) -> Any:
        """What stands for a function or a class."""
        if isinstance(held, types.FunctionType):
            return _name_of(held)
        return (held.__module__, held.__qualname__) if isinstance(held, type) else None


def _name_of(function: types.FunctionType) -> tuple[Any, ...]:
    """What tells a function from others, the same in each process: its name, its code, numbers
    that it closes over.
    """
    code = function.__code__
    plain = [value for value in (*closed_over(function), *code.co_consts) if type(value) in PLAIN]
    return (
        function.__module__,
        function.__qualname__,
        code.co_firstlineno,
        code.co_code,
        code.co_names,
        plain,
    )


class _Hash:
    """A file to write to."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.hash.update(data)


class _Pickler(CodeByName):
    def persistent_id(self, value: Any) -> Any:
        """As of any code, and what stands for a tensor or a module."""
        if isinstance(value, nn.Module):
            return type(
                value
            ).__qualname__  # it is looked at on its own, and has another id on each rank
        return (
            (tuple(value.shape), digest(value))
            if isinstance(value, torch.Tensor)
            else super().persistent_id(value)
        )


def hash_of(value: Any, pickler: Callable[[Any], pickle.Pickler] = _Pickler) -> bytes | None:
    """A hash of what a value holds, as a pickler writes it to a file; None where it can't be
    pickled.
    """
    written = _Hash()
    try:
        pickler(written).dump(value)
    except Exception:
        return None
    return written.hash.digest()
