"""Placing: parameters and buffers are moved to a device as the same objects, so that ties and
optimizers keep them.

``.data =`` doesn't take a tensor of a device type that PyTorch doesn't know itself, and
``Module.to`` makes new parameters there, one for each name. ``torch.utils.swap_tensors`` keeps the
objects; autograd is told their hooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tensors.common_memory import common_memory_kept
from lockstep.tensors.pytree import tensors as tensors_of

_BUCKET = 32 << 20
"""Bytes that are copied between accelerators together: enough that the start of a copy doesn't
count.
"""


def place_module(module: nn.Module, place: torch.device) -> None:
    """Move a module's parameters and buffers to a device, as ``Module.to`` does, with its ties
    and hooks.
    """
    with common_memory_kept(module):
        if torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=place)):
            module.to(place)
            return
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to(place)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for parameter in module.parameters():
            _connect_hooks(parameter)


@torch.no_grad()
def place_tensor(tensor: Tensor, place: torch.device) -> None:
    """Move one parameter or buffer to a device, without its gradient."""
    tensor.grad = None
    moved = tensor.data.to(place)
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
        return
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
    _connect_hooks(tensor)


def moved_in_buckets(
    tensors: Sequence[Tensor], place: torch.device
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Copies on another device, whose number grows with the bytes, not with the tensors: (which of
    them, the copies).

    One that isn't dense is copied by itself.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or not _is_dense(tensor):
            yield [i], [tensor.to(place, non_blocking=True)]
            continue
        kind = tensor.dtype, tensor.device
        size = tensor.numel() * tensor.element_size()
        if kind in buckets and sizes[kind] + size > _BUCKET:
            yield _moved_together(buckets.pop(kind), tensors, place)
        sizes[kind] = size if kind not in buckets else sizes[kind] + size
        buckets.setdefault(kind, []).append(i)
    for bucket in buckets.values():
        yield _moved_together(bucket, tensors, place)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _moved_together(
    bucket: list[int], tensors: Sequence[Tensor], place: torch.device
) -> tuple[list[int], list[Tensor]]:
    mine = [tensors[i].detach() for i in bucket]
    if len(mine) == 1:
        return bucket, [mine[0].to(place, non_blocking=True)]
    flat = torch.cat([t.as_strided((t.numel(),), (1,)) for t in mine]).to(place, non_blocking=True)
    offsets = itertools.accumulate((t.numel() for t in mine), initial=0)
    return bucket, [
        flat.as_strided(t.shape, t.stride(), at) for t, at in zip(mine, offsets, strict=False)
    ]


def _connect_hooks(tensor: Tensor) -> None:
    """After a swap the hooks are still the Python object's, but autograd doesn't call them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def place_of(nest: Any) -> torch.device:
    """The device of the first tensor of a nest; the CPU where there is none."""
    return next((tensor.device for tensor in tensors_of(nest)), torch.device("cpu"))
