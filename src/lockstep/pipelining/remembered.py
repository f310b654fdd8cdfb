"""Remembered: what one micro-batch's forward leaves behind for the next, beside gradients.

Micro-batches that overlap can't leave it in the order in which one device would, unless all of it is left and used in
one visit of one stage (running statistics of a batch norm, say).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.build import buffers_of, digest
from lockstep.seeding import other_states

_OWN = {"_parameters", "_buffers", "_modules", "training"}


class Remembered:
    """The state of a model before a micro-batch.

    Args:
        model: which is to compute one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._buffers = [(module, name, self._value(module, name)) for module, name in buffers_of(model)]
        self._attributes = {module: _attributes(module) for module in self._names}
        self._drawn = other_states()
        self._forward: list[object] = []

    def _value(self, module: nn.Module, name: str) -> object:
        return digest(module._buffers[name])

    def after_forward(self) -> None:
        """Called between forward and backward."""
        self._forward = [self._value(module, name) for module, name, _ in self._buffers]

    def why_in_turn(self, calls: dict[nn.Module, set[int]]) -> str | None:
        """After the backward: why micro-batches can't overlap, or None.

        Args:
            calls: for each module the visits of the forward in which it was called.
        """
        for (module, name, before), between in zip(self._buffers, self._forward, strict=True):
            full = f"{self._names[module]}.{name}".lstrip(".")
            if self._value(module, name) != between:
                return f'buffer "{full}" is written in backward'
            if between != before and len(self._visits(module, calls)) != 1:
                return f'buffer "{full}" is written by more than one stage, or more than once'
        for module, before_ in self._attributes.items():
            now = _attributes(module)
            changed = next((key for key in now if not _alike(before_.get(key, _MISSING), now[key])), None)
            if changed is not None:
                where = self._names[module]
                return f'forward sets "{f"{where}.{changed}".lstrip(".")}", which another micro-batch would overwrite'
        if not _same_drawn(self._drawn, other_states()):
            return "forward draws from Python's or numpy's random, whose order would be left to chance"
        return None

    def _visits(self, module: nn.Module, calls: dict[nn.Module, set[int]]) -> set[int]:
        """Those of the module, or of the nearest one around it that was called."""
        modules = {name: m for m, name in self._names.items()}
        words = self._names[module].split(".")
        for length in range(len(words), -1, -1):
            around = modules.get(".".join(words[:length]))
            if around is not None and around in calls:
                return calls[around]
        return set()


_MISSING = object()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        key: _contents(value)
        for key, value in vars(module).items()
        if key not in _OWN and not key.endswith("_hooks") and "_hooks_" not in key
    }


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return [value, *value.values()]
    if isinstance(value, list | set):
        return [value, *value]
    return value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one[1:], other[1:]))
    if one is other:
        return True
    plain = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _same_drawn(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] != other[0]:
        return False
    if one[1] is None or other[1] is None:
        return True
    return bool((one[1][1] == other[1][1]).all()) and tuple(one[1][2:]) == tuple(other[1][2:])
