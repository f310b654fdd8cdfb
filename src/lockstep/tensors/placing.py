"""Placing: parameters and buffers are moved to a device as the same objects, so that ties and
optimizers keep them.

``.data =`` doesn't take a tensor of a device type that PyTorch doesn't know itself, and
``Module.to`` makes new parameters there, one for each name. ``torch.utils.swap_tensors`` keeps the
objects; their hooks are given to autograd again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tensors.common_memory import common_memory_unmoved
from lockstep.tensors.pytree import tensors as tensors_of

_BUCKET = 32 << 20
"""Bytes that are copied between accelerators together: enough that the start of a copy doesn't
count.
"""


def place_module(module: nn.Module, place: torch.device) -> None:
    """Move a module's parameters and buffers to a device.

    This is ``Module.to``, but ties and hooks are kept.
    """
    with common_memory_unmoved(module):
        here = torch.empty(0)
        there = torch.empty(0, device=place)
        if torch._has_compatible_shallow_copy_type(here, there):
            module.to(place)
            return

        future = torch.__future__
        swaps = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            module.to(place)
        finally:
            future.set_swap_module_params_on_conversion(swaps)
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
    """Yield copies on another device: (which of the tensors, the copies).

    The number of copying operations grows with the bytes, not with the tensors. A tensor that isn't
    dense is copied by itself.

    Args:
        tensors: of any types, on any devices.
        place: the device that they are copied to.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for i, tensor in enumerate(tensors):
        if not _is_dense(tensor):
            yield [i], [tensor.to(place, non_blocking=True)]
            continue
        kind = tensor.dtype, tensor.device
        size = tensor.numel() * tensor.element_size()
        if sizes[kind] and sizes[kind] + size > _BUCKET:
            yield _moved_together(buckets.pop(kind), tensors, place)
            sizes[kind] = 0
        sizes[kind] += size
        buckets.setdefault(kind, []).append(i)

    for bucket in buckets.values():
        yield _moved_together(bucket, tensors, place)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie side by side, in one of PyTorch's usual orders."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _moved_together(
    bucket: list[int], tensors: Sequence[Tensor], place: torch.device
) -> tuple[list[int], list[Tensor]]:
    """Copy the tensors of a bucket by one operation.

    Args:
        bucket: which of the tensors are copied; they are dense, of one type and on one device.
        tensors: all tensors.
        place: the device that they are copied to.
    """
    mine = [tensors[i].detach() for i in bucket]
    if len(mine) == 1:
        return bucket, [mine[0].to(place, non_blocking=True)]

    flat = torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in mine])
    flat = flat.to(place, non_blocking=True)
    copies = []
    offset = 0
    for tensor in mine:
        copies.append(flat.as_strided(tensor.shape, tensor.stride(), offset))
        offset += tensor.numel()

    return bucket, copies


def _connect_hooks(tensor: Tensor) -> None:
    """Have autograd call a tensor's hooks: after a swap only the Python object has them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def place_of(nest: Any) -> torch.device:
    """Return the device of the first tensor of a nest; the CPU where there is none."""
    return next((tensor.device for tensor in tensors_of(nest)), torch.device("cpu"))
