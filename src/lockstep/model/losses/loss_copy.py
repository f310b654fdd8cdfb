"""A copy of a loss that is a module, in another number format or on another device.

The copy follows the module.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from lockstep.model.attributes import is_plain

_TENSORS_AND_LAYERS = ("_parameters", "_buffers", "_modules")
_Place = tuple[str, str | None, str]
"""The name of a module in another one, the name of one of its dictionaries, and the key in that.

None stands for the attributes of the module.
"""


class FollowedCopy:
    """A copy of a module.

    Args:
        original: the module.
        to: the format of the copy's floating tensors, or its device.

    Attributes:
        copy: the copy. Calls may change it, and leave the original as it is.
    """

    def __init__(self, original: nn.Module, to: torch.dtype | torch.device) -> None:
        self._original = original
        self._to = to
        self.copy = self._made()
        self._before = _stamps(original)

    def follow(self) -> None:
        """Give the copy what was changed in the module: class weights, a temperature, a layer."""
        before = self._before
        self._before = _stamps(self._original)
        changed = []
        for place, stamp in self._before.items():
            if place not in before or before[place] != stamp:
                changed.append(place)
        if not changed:
            return
        new = dict(self._made().named_modules())
        copied = dict(self.copy.named_modules())
        for name, kind, key in changed:
            if name in copied:
                _dictionary(copied[name], kind)[key] = _dictionary(new[name], kind)[key]

    def _made(self) -> nn.Module:
        return copy.deepcopy(self._original).to(self._to)


def _dictionary(module: nn.Module, kind: str | None) -> dict[str, Any]:
    attributes = vars(module)
    return attributes if kind is None else cast("dict[str, Any]", attributes[kind])


def _stamps(module: nn.Module) -> dict[_Place, Any]:
    """Give a stamp of each thing in a module, which differs once the thing was changed."""
    found: dict[_Place, Any] = {}
    for name, one in module.named_modules():
        for kind in _TENSORS_AND_LAYERS:
            for key, value in _dictionary(one, kind).items():
                found[name, kind, key] = _stamp(value)
        for key, value in vars(one).items():
            if key not in _TENSORS_AND_LAYERS:
                found[name, None, key] = _stamp(value)
    return found


def _stamp(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return copy.copy(value) if is_plain(value) else id(value)
