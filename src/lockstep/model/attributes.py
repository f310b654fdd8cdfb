"""Plain attributes of modules: numbers, texts, switches, and nests of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None))

_INTERNAL = set(vars(nn.Module())) - {"training"}
"""What PyTorch keeps in each module."""


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a switch, or a list, tuple or dictionary of such."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def follow_settings(replica: Sequence[nn.Module], model: Sequence[nn.Module]) -> None:
    """Give the modules of a replica the model's plain attributes: ``training``, a temperature.

    An object that several modules share is one object in the replica, too.

    Args:
        replica: the modules of the replica.
        model: the modules of the model, in the same order.
    """
    copies: dict[int, Any] = {}
    for mine, other in zip(model, replica, strict=True):
        theirs = vars(other)
        for name, value in vars(mine).items():
            if theirs.get(name) is value or name in _INTERNAL:
                continue
            if is_plain(value):
                theirs[name] = copy.deepcopy(value, copies)
