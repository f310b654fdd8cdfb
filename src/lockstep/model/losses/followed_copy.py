"""A copy of a module in another number format, or on another device, that follows the module: a
loss has some.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from lockstep.model.attributes import is_plain

_TENSORS_AND_LAYERS = ("_parameters", "_buffers", "_modules")
_Place = tuple[str, str | None, str]
"""The name of a module in another one, which of its dictionaries is meant, and the key in that."""


class FollowedCopy:
    """A copy of a module.

    Args:
        original: the module.
        to: the format of the copy's floating tensors, or its device.

    Attributes:
        copy: the copy. What its calls change in it is its own.
    """

    def __init__(self, original: nn.Module, to: torch.dtype | torch.device) -> None:
        self._original, self._to = original, to
        self.copy = self._made()
        self._before = _stamps(original)

    def follow(self) -> None:
        """Give the copy what was changed in the module: class weights, a temperature, a layer."""
        before, self._before = self._before, _stamps(self._original)
        changed = [
            place
            for place, stamp in self._before.items()
            if place not in before or before[place] != stamp
        ]
        if not changed:
            return
        mine, theirs = dict(self._made().named_modules()), dict(self.copy.named_modules())
        for name, kind, key in changed:
            if name in theirs:
                _dictionary(theirs[name], kind)[key] = _dictionary(mine[name], kind)[key]

    def _made(self) -> nn.Module:
        return copy.deepcopy(self._original).to(self._to)


def _dictionary(module: nn.Module, kind: str | None) -> dict[str, Any]:
    its = module.__dict__
    return its if kind is None else cast("dict[str, Any]", its[kind])


def _stamps(module: nn.Module) -> dict[_Place, Any]:
    """What shows that something in a module has changed, for each thing."""
    found: dict[_Place, Any] = {}
    for name, one in module.named_modules():
        for kind in _TENSORS_AND_LAYERS:
            found |= {
                (name, kind, key): _stamp(value) for key, value in _dictionary(one, kind).items()
            }
        found |= {
            (name, None, k): _stamp(value)
            for k, value in vars(one).items()
            if k not in _TENSORS_AND_LAYERS
        }
    return found


def _stamp(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return copy.copy(value) if is_plain(value) else id(value)
