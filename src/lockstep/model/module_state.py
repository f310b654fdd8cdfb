"""What modules hold beside parameters and buffers: extra state, and what is frozen.

Extra state is what PyTorch's ``get_extra_state`` gives and ``set_extra_state`` takes. Replicas may
have different extra state (the hidden state for their own rows of a batch), so it is read from each
replica and given back to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights import EXTRA_STATE
from lockstep.tensors.pytree import each


def extra_state_of(model: nn.Module) -> dict[str, Any]:
    """Copy the extra state of each module to the CPU, by its name in a state dict."""
    modules = _with_extra_state(model)
    return {name: each(_on_cpu, module.get_extra_state()) for name, module in modules}


def set_extra_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules the extra state that ``extra_state_of`` read.

    Args:
        model: has the modules.
        state: by name in a state dict; modules that aren't in it keep theirs.
    """
    for name, module in _with_extra_state(model):
        if name in state:
            module.set_extra_state(state[name])


def flags_of(model: nn.Module) -> dict[str, str]:
    """Describe which parameters are frozen, and the modes of modules.

    ``{"0.weight.requires_grad": "True", "0.training": "True"}``, for example. The modes are left
    out where the model is in evaluation mode as a whole.
    """
    found = {}
    for name, p in model.named_parameters():
        found[f"{name}.requires_grad"] = str(p.requires_grad)
    if model.training:
        for name, module in model.named_modules():
            found[f"{name}.training"] = str(module.training)
    return found


def set_flags(model: nn.Module, flags: Mapping[str, str]) -> None:
    """Freeze and train parameters, and set the modes of modules, as ``flags_of`` described them."""
    for name, p in model.named_parameters():
        flag = flags.get(f"{name}.requires_grad")
        if flag is not None:
            p.requires_grad_(flag == str(True))
    for name, module in model.named_modules():
        mode = flags.get(f"{name}.training")
        if mode is not None:
            module.training = mode == str(True)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the modules whose class has a ``get_extra_state``, by their names in a state dict."""
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}.{EXTRA_STATE}".removeprefix("."), module


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, so that later updates leave it alone."""
    return tensor.detach().to("cpu", copy=True)
