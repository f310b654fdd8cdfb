"""The tensors that must not lie in the memory of a parameter that is sharded: they don't see
what its shards become.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.tensors.common_memory import tensors_of
from lockstep.tensors.pytree import tensors


def held_tensors(
    model: nn.Module, functions: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, of its loss and of metrics, by name: parameters, buffers, attributes.

    Args:
        model: the model.
        functions: the loss and metrics, by name.
    """
    yield from tensors_of(model)
    every = dict(model.named_parameters(remove_duplicate=False))
    for owner, holder in (*model.named_modules(), *functions.items()):
        for key, value in getattr(holder, "__dict__", {}).items():
            name = f"{owner}.{key}".lstrip(".")
            # ``spectral_norm`` begins with an attribute in the memory of what it is computed from.
            if not key.startswith("_") and f"{name}_orig" not in every:
                yield from ((name, tensor) for tensor in tensors(value))
