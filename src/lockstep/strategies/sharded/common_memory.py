"""Tensors in the memory of a parameter that are other objects: they don't see what is written to its shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.model.inspection import OutsideVariables, attribute_tensors


def refuse_common_memory(model: nn.Module, functions: Mapping[str, Any]) -> None:
    """Refuse a parameter that is trained and shares memory with another tensor of the model, the loss or a metric.

    Args:
        model: it.
        functions: the loss and metrics, by name.

    Raises:
        StrategyError: with the names of both.
    """
    spans: list[tuple[int, int, str, bool]] = []
    seen: set[int] = set()
    for name, tensor, is_trained in _held(model, functions):
        if id(tensor) not in seen and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            seen.add(id(tensor))
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name, is_trained))
    ends: dict[bool, tuple[int, str]] = {True: (0, ""), False: (0, "")}  # the furthest so far, of trained ones or not
    for start, end, name, is_trained in sorted(spans):
        for others in (True, False) if is_trained else (True,):
            furthest, other = ends[others]
            if start < furthest:
                raise StrategyError(
                    f'fsdp: "{other}" and "{name}" have memory in common without being one parameter (by .data, '
                    "detach() or a view), and what is written to a shard of one the other would not see: give both "
                    "modules the parameter itself, clone it, or take ddp"
                )
        ends[is_trained] = max(ends[is_trained], (end, name))


def _held(model: nn.Module, functions: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The name of each tensor, it, and whether it is trained: parameters, buffers, attributes, outside variables."""
    yield from ((name, p, p.requires_grad) for name, p in model.named_parameters())
    owners: list[tuple[str, Any]] = [*model.named_modules()]
    of_others = model.named_buffers()
    for called, function in functions.items():
        outside = OutsideVariables([function])
        owners += [(called, function), *((called, part) for module in outside.modules for part in module.modules())]
        of_others = itertools.chain(of_others, outside.held_tensors())
    every = dict(model.named_parameters(remove_duplicate=False))
    # (``spectral_norm`` begins with an attribute in the memory of what it computes it from.)
    of_attributes = ((name, t) for name, t in attribute_tensors(owners) if f"{name}_orig" not in every)
    yield from ((name, tensor, False) for name, tensor in itertools.chain(of_others, of_attributes))
