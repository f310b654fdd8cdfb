"""A copy of a loss that is a module, in another number format or on another device.

The copy follows the module.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lockstep.model.attributes import is_plain


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
        self._stamps: list[Any] = []
        self.copy = original
        self.follow()

    def follow(self) -> nn.Module:
        """Copy the module anew where something in it was changed: class weights, a temperature."""
        stamps = _stamps(self._original)
        if stamps != self._stamps:
            self._stamps = stamps
            self.copy = copy.deepcopy(self._original).to(self._to)
        return self.copy


def _stamps(module: nn.Module) -> list[Any]:
    """Give stamps of all that is in a module, which differ once something was changed."""
    found: list[Any] = []
    for name, one in module.named_modules():
        found.append(name)
        for key, value in {**vars(one), **one._parameters, **one._buffers}.items():
            found.append((key, _stamp(value)))
    return found


def _stamp(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return copy.copy(value) if is_plain(value) else id(value)
