"""Tensors in the memory of a parameter that are other objects: they don't see what is written to its shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.tensors.pytree import tensors


def refuse_common_memory(model: nn.Module, loss: Any) -> None:
    """Refuse a model where a parameter that is trained shares memory with another tensor of the model, or of its loss.

    Raises:
        StrategyError: with the names of both.
    """
    spans: list[tuple[int, int, str, bool]] = []
    seen: set[int] = set()
    for name, tensor, is_trained in _held(model, loss):
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


def _held(model: nn.Module, loss: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The name of each tensor, it, and whether it is trained: parameters, buffers, attributes."""
    for name, p in model.named_parameters():
        yield name, p, p.requires_grad
    yield from ((name, b, False) for name, b in model.named_buffers())
    of_loss = loss.named_modules() if isinstance(loss, nn.Module) else [("", loss)]
    for way, held in (*model.named_modules(), *((f"loss.{name}".rstrip("."), one) for name, one in of_loss)):
        for key, value in getattr(held, "__dict__", {}).items():
            # (``spectral_norm`` begins with an attribute in the memory of what it computes it from.)
            if not key.startswith("_") and f"{key}_orig" not in getattr(held, "_parameters", {}):
                yield from ((f"{way}.{key}".lstrip("."), t, False) for t in tensors(value))
