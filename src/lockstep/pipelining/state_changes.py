"""State changes: what a model holds that is different after a micro-batch.

Micro-batches that overlap come to a stage in the order of one device, but to the whole model in no
order. So what one of them leaves in a module may be read by another one too early or too late::

    self.past = x.mean(0)        micro-batch 0 has gone on to stage 1 ...
    x = x + self.past            ... and reads what micro-batch 1 has set on stage 0 meanwhile

The versions of tensors (PyTorch counts the writes to each), the identity of attributes and of what
lies in lists, dictionaries and objects are compared wherever a micro-batch leaves a stage, since
another one may come there next. Running statistics of a BatchNorm are in order if they move once in
a micro-batch: each stage takes the micro-batches in their order.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
"""Types whose equal values are the same."""

_CODE = (type, types.FunctionType, types.ModuleType, nn.Module)

_TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what it shows as attributes."""

_LONG = 1000
"""Items of a container beyond which it holds data, say, and no state."""

Key = tuple[str, str]
"""The name of a module, and of what it holds."""


class StateChanges:
    """What the modules of a model hold, compared from time to time in one micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._held = self._snapshot()
        self._moved: set[Key] = set()  # statistics of BatchNorm

    def found(self) -> str | None:
        """Return the name of a tensor or attribute that has changed since the last call, if any."""
        before = self._held
        now = self._snapshot()
        self._held = now
        changed = None
        for key in before | now:
            if _same(before.get(key, []), now.get(key, [])):
                continue
            if self._is_statistic(*key) and key not in self._moved:
                self._moved.add(key)
            elif changed is None:
                changed = ".".join(filter(None, key))
        return changed

    def _snapshot(self) -> dict[Key, list[Any]]:
        """Note each attribute, tensor and submodule with its state."""
        held: dict[Key, list[Any]] = {}
        for name, module in self._modules.items():
            values = dict(vars(module))
            for table in _TABLES:
                values.update(values.pop(table))
            for own, value in values.items():
                held[name, own] = _state(value)
        return held

    def _is_statistic(self, name: str, own: str) -> bool:
        module = self._modules[name]
        return isinstance(module, _NormBase) and own in module._buffers


def _state(value: Any) -> list[Any]:
    """Give what tells a changed value from what it was."""
    state: list[Any] = [value]
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            state.append(value._version)
        state.append(value.requires_grad)
        return state
    state += _items(value)
    return state


def _same(before: list[Any], now: list[Any]) -> bool:
    """Return whether values are the same objects, or equal numbers or texts."""
    if len(before) != len(now):
        return False
    for mine, theirs in zip(before, now, strict=True):
        if mine is theirs:
            continue
        if type(mine) is not type(theirs) or not isinstance(mine, _PLAIN) or mine != theirs:
            return False
    return True


def _items(value: Any) -> Collection[Any]:
    """List what lies in a container, or in an object that layers share; of long ones the length."""
    items: Collection[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | set):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, _CODE):
        items = vars(value).values()
    if len(items) > _LONG:
        return [len(items)]
    return list(items)
