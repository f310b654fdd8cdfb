"""Model facts: what a comparison needs to know of a model beside its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.tensors.digest import digest

_OF_EVERY_MODULE = {*vars(nn.Module()), "forward"}


def attribute_values(model: nn.Module) -> dict[str, Any]:
    """Return the values of plain attributes (``"body.calls"``): numbers, texts, tensors, and lists,
    tuples and dictionaries of these.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    found = {}
    for way, module in model.named_modules():
        for key, held in vars(module).items():
            if key not in _OF_EVERY_MODULE:
                found[f"{way}.{key}".lstrip(".")] = _value(held, own)

    return found


def _value(held: Any, own: set[int]) -> Any:
    """Return what can be compared.

    The model's own tensors (a list of an RNN's weights) are left out.
    """
    if isinstance(held, torch.Tensor):
        return None if id(held) in own else digest(held)
    if isinstance(held, dict):
        return [(key, _value(value, own)) for key, value in held.items()]
    if isinstance(held, list | tuple):
        return [_value(value, own) for value in held]
    if isinstance(held, int | float | complex | str):
        return repr(held)
    return None
