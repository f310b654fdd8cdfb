"""Placing: parameters and buffers are moved to a device as the same objects, so that ties and optimizers keep them.

``.data =`` doesn't take a tensor of a device type that PyTorch doesn't know itself, and ``Module.to`` makes new
parameters there, one for each name. ``torch.utils.swap_tensors`` keeps the objects; autograd is told their hooks.
"""

from __future__ import annotations

import torch
from torch import nn


def place_module(module: nn.Module, place: torch.device) -> None:
    """Move a module's parameters and buffers to a device, as ``Module.to`` does, with its ties and hooks."""
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
def place_tensor(tensor: torch.Tensor, place: torch.device) -> None:
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


def _connect_hooks(tensor: torch.Tensor) -> None:
    """After a swap the hooks are still the Python object's, but autograd doesn't call them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)
