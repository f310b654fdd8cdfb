"""Tensors in common memory that are several objects: ``nn.Parameter(other.t())``, and what it
was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.errors import JobError


def refuse_common_memory(model: nn.Module) -> None:
    """Refuse a trained parameter that begins in memory where another parameter or buffer begins.

    Each would get its own memory where the model is converted, moved or cut.

    Raises:
        JobError: with the names of both.
    """
    names: dict[int, str] = {}
    trained: set[int] = set()
    for name, tensor in tensors_of(model):
        if not _is_plain(tensor):
            continue
        place = tensor.data_ptr()
        other = names.setdefault(place, name)
        if tensor.requires_grad:
            trained.add(place)
        if other != name and place in trained:
            raise JobError(
                f'model: "{name}" and "{other}" have memory in common without being one parameter '
                "(by .data, detach() or a view): give both modules the parameter itself, or clone it"
            )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own that can be told: no subclass, sparse or on
    meta.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    return bool(tensor.numel()) and not tensor.is_meta


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters and buffers, by name."""
    return itertools.chain(model.named_parameters(), model.named_buffers())
