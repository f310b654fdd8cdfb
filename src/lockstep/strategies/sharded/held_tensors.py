"""The tensors that must not lie in the memory of a parameter that is sharded: they don't see
what its shards become.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.model.inspection import OutsideVariables, attribute_tensors
from lockstep.tensors.common_memory import tensors_of


def held_tensors(
    model: nn.Module, functions: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, of its loss and of metrics, by name: parameters, buffers, attributes,
    outside variables.

    Args:
        model: it.
        functions: the loss and metrics, by name.
    """
    yield from tensors_of(model)
    owners: list[tuple[str, Any]] = [*model.named_modules()]
    for called, function in functions.items():
        outside = OutsideVariables([function])
        owners += [
            (called, function),
            *((called, part) for module in outside.modules for part in module.modules()),
        ]
        yield from outside.held_tensors()
    every = dict(model.named_parameters(remove_duplicate=False))
    # (``spectral_norm`` begins with an attribute in the memory of what it computes it from.)
    yield from ((name, t) for name, t in attribute_tensors(owners) if f"{name}_orig" not in every)
