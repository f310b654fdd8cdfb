"""Contents: what a model's modules hold beside the values of its tensors, compared with what they hold later.

Attributes, parameters, buffers, modules and hooks are compared as objects, numbers and words as what they say; lists,
dicts and sets by what is in them. What lies deeper (a generator, an object of a class of one's own, a dict in a dict)
has no look from outside, so it is pickled, into a hash.
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type(None))
_NAMED = ("_parameters", "_buffers", "_modules")
"""The dicts whose items a person knows by the name of the module and their own."""


class Contents:
    """What modules hold now.

    Args:
        modules: and their names.
    """

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._of: list[tuple[str, str]] = []  # the module's name, and that of its container; "" for all attributes
        self._held: list[Any] = []
        for module, name in modules.items():
            attributes = vars(module)
            self._of.append((name, ""))
            self._held.append(attributes)
            for own, value in attributes.items():
                if isinstance(value, dict | list | set):
                    self._of.append((name, own))
                    self._held.append(value)
        self._copies = [held.copy() for held in self._held]

    @property
    def stands(self) -> bool:
        """Whether nothing is other now, at a glance: a tensor that was replaced by an equal number may be missed."""
        try:
            return self._held == self._copies
        except Exception:  # what can't be asked whether it is equal, as a tensor of several numbers, is another one
            return False

    def changed(self) -> Iterator[str]:
        """The names of what is other now."""
        for (module, container), held, copy in zip(self._of, self._held, self._copies, strict=True):
            before, now = _items(copy), _items(held)
            if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())):
                continue
            for key in {**before, **now}:
                if not _alike(before.get(key, _MISSING), now.get(key, _MISSING)):
                    yield joined(module, str(key) if container in ("", *_NAMED) else container)


def prints(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], bytes]:
    """A hash of each attribute that comparing objects says nothing of; of none that can't be pickled."""
    found: dict[tuple[nn.Module, str], bytes] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not name.endswith("_hooks") and not _is_compared(value):
                with io.BytesIO() as file:
                    try:
                        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
                    except Exception:
                        continue
                    found[module, name] = hashlib.blake2b(file.getbuffer(), digest_size=16).digest()
    return found


def joined(module: str, name: str) -> str:
    """The full name of what a module of that name holds."""
    return f"{module}.{name}".lstrip(".")


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return id(value) if isinstance(value, nn.Module) else None  # it has contents of its own


def _items(held: Any) -> Mapping[Any, Any]:
    return held if isinstance(held, dict) else dict(enumerate(held))


def _alike(one: Any, other: Any) -> bool:
    """Whether two are the same object, an equal number or word, or a list and its like that hold alike things."""
    if one is other:
        return True
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other


def _is_compared(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        value = (value,)
    return all(isinstance(inner, (*_PLAIN, torch.Tensor, nn.Module)) for inner in value)
