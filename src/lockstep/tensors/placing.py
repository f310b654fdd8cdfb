"""Placing: parameters and buffers are moved to a device as the same objects, so that ties and
optimizers keep them.

``.data =`` doesn't take a tensor of a device type that PyTorch doesn't know itself, and
``Module.to`` makes new parameters there, one for each name. ``torch.utils.swap_tensors`` keeps the
objects; their hooks are given to autograd again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from lockstep.tensors.pytree import tensors as tensors_of

_BUCKET = 32 << 20
"""Bytes that are copied between accelerators together: enough that the start of a copy doesn't
count.
"""


def place_module(module: nn.Module, place: torch.device) -> None:
    """Move a module's parameters and buffers to a device.

    This is ``Module.to``, but ties and hooks are kept.
    """
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


@torch.no_grad()
def moved_in_buckets(
    tensors: Sequence[Tensor], place: torch.device
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield copies on another device: (some of the tensors, their copies).

    The number of copying operations grows with the bytes, not with the tensors. A tensor that isn't
    dense is copied by itself.

    Args:
        tensors: of any types, on one device.
        place: the device that they are copied to.
    """
    dense = []
    for tensor in tensors:
        if _is_dense(tensor):
            dense.append(tensor)
        else:
            yield [tensor], [tensor.to(place, non_blocking=True)]

    for bucket in _take_tensors(dense, _BUCKET):  # type: ignore[no-untyped-call]
        rows = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in bucket]
        flat = _flatten_dense_tensors(rows)  # type: ignore[no-untyped-call]
        moved = flat.to(place, non_blocking=True)
        moved_rows = _unflatten_dense_tensors(moved, rows)  # type: ignore[no-untyped-call]
        copies = []
        for tensor, row in zip(bucket, moved_rows, strict=True):
            copies.append(row.as_strided(tensor.shape, tensor.stride()))
        yield bucket, copies


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor lie side by side, in one of PyTorch's usual orders."""
    if tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _connect_hooks(tensor: Tensor) -> None:
    """Have autograd call a tensor's hooks: after a swap only the Python object has them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def place_of(nest: Any) -> torch.device:
    """Return the device of the first tensor of a nest; the CPU where there is none."""
    return next((tensor.device for tensor in tensors_of(nest)), torch.device("cpu"))
