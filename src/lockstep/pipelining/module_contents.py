"""Contents: what a module holds beside parameters, buffers and modules, and whether it still holds the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

OWN = {"_parameters", "_buffers", "_modules", "training"}
MISSING = object()


def attributes(module: nn.Module) -> dict[str, Any]:
    """Those that aren't PyTorch's own, each as ``contents`` gives it."""
    return {key: contents(value) for key, value in vars(module).items() if is_plain(key)}


def is_plain(attribute: str) -> bool:
    """Whether it isn't one of PyTorch's own."""
    return attribute not in OWN and not holds_hooks(attribute)


def holds_hooks(attribute: str) -> bool:
    """Whether it is one of the dictionaries in which PyTorch keeps a module's hooks."""
    return attribute.endswith("_hooks") or "_hooks_" in attribute


def contents(value: Any) -> Any:
    """A dict, a list or a set with what it holds now, as a list; anything else as it is."""
    if isinstance(value, dict):
        return [value, *value.values()]
    if isinstance(value, list | set):
        return [value, *value]
    return value


def alike(one: Any, other: Any) -> bool:
    """Whether two of ``contents`` are the same object, an equal number or word, or hold alike things."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one[1:], other[1:]))
    if one is other:
        return True
    plain = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def values(container: Any) -> Iterable[Any]:
    """What a dict, a list or a set holds."""
    return container.values() if isinstance(container, dict) else container


def joined(module: str, name: str) -> str:
    """The full name of what a module of that name holds."""
    return f"{module}.{name}".lstrip(".")
