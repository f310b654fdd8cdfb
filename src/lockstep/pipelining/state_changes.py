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

_MISSING = (object(), None)

_CODE = (type, types.FunctionType, types.ModuleType, nn.Module)

_LONG = 1000
"""Items of a container beyond which it holds data, say, and no state."""


class StateChanges:
    """What the modules of a model hold, compared from time to time in one micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._held = self._snapshot()
        self._moved: set[tuple[str, str]] = set()  # statistics of BatchNorm

    def found(self) -> str | None:
        """Return the name of a tensor or attribute that has changed since the last call, if any."""
        before = self._held
        now = self._held = self._snapshot()
        changed = None
        for key in before | now:
            old, old_state = before.get(key, _MISSING)
            new, new_state = now.get(key, _MISSING)
            if _same_state(old_state, new_state) and (old is new or _equal(old, new)):
                continue
            if self._is_statistic(*key) and key not in self._moved:
                self._moved.add(key)
                continue
            changed = changed or ".".join(filter(None, key))
        return changed

    def _snapshot(self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Each attribute, tensor and submodule with its state, by its module's and own name."""
        held: dict[tuple[str, str], tuple[Any, Any]] = {}
        for name, module in self._modules.items():
            tables = vars(module), module._parameters, module._buffers, module._modules
            for table in tables:
                for own, value in table.items():
                    state: Any = None
                    if isinstance(value, torch.Tensor):
                        version = None if value.is_inference() else value._version
                        state = version, value.requires_grad
                    else:
                        state = _contents(value)
                    held[name, own] = value, state
        return held

    def _is_statistic(self, name: str, own: str) -> bool:
        module = self._modules[name]
        return isinstance(module, _NormBase) and own in module._buffers


def _contents(value: Any) -> Any:
    """What lies in a container, or in an object that layers share; of long ones only the length."""
    if isinstance(value, dict):
        items: Collection[Any] = value.values()
    elif isinstance(value, list | set):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, _CODE):
        items = vars(value).values()
    else:
        return None
    return list(items) if len(items) <= _LONG else len(items)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(a is b or _equal(a, b) for a, b in pairs)
    return bool(one == other)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)
