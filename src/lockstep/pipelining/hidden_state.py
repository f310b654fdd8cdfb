"""Deep: the state that modules hold deeper than in an attribute, a list or a dict, as a print of each attribute.

A generator of random numbers, an object of a class of one's own, a dict in a dict: what a forward changes in there
isn't seen by comparing objects. So such attributes are pickled, into a hash, before and after one micro-batch.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.pipelining.module_contents import is_plain

_KNOWN = (torch.Tensor, nn.Module, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type(None))
"""What an attribute is compared as it is."""


class _Hash:
    """A file that keeps a print of what is written."""

    def __init__(self) -> None:
        self._sum = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._sum.update(data)
        return memoryview(data).nbytes

    def digest(self) -> bytes:
        return self._sum.digest()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):  # it has prints of its own
            return str, (str(id(value)),)
        return NotImplemented


def prints(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], bytes]:
    """A print of each attribute of these modules that isn't compared as it is; of none that can't be pickled."""
    found: dict[tuple[nn.Module, str], bytes] = {}
    seen: dict[int, bytes | None] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not is_plain(name) or _is_known(value):
                continue
            if id(value) not in seen:
                seen[id(value)] = _print_of(value)
            if (made := seen[id(value)]) is not None:
                found[module, name] = made
    return found


def _is_known(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return all(isinstance(inner, _KNOWN) for inner in value)
    return isinstance(value, _KNOWN)


def _print_of(value: Any) -> bytes | None:
    made = _Hash()
    try:
        _Pickler(made, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return None
    return made.digest()
