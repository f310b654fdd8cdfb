"""Hooks on parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def hooked_parameters(model: nn.Module) -> list[str]:
    """Find the names of parameters with a hook on the gradient, of either kind."""
    return [name for name, p in model.named_parameters() if is_hooked(p)]


def is_hooked(p: torch.Tensor) -> bool:
    """Return whether a parameter has a hook on its gradient, of either kind.

    The hooks of ``fully_shard`` don't count. It sets them on outputs in each forward, and an output
    that is a parameter keeps them.
    """
    if getattr(p, "_post_accumulate_grad_hooks", None):
        return True
    modules = [str(getattr(hook, "__module__", "")) for hook in (p._backward_hooks or {}).values()]
    return not all(module.startswith("torch.distributed.fsdp.") for module in modules)


_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[Any]:
    """List how many hooks each module has, and whether it has a forward of its own and each
    parameter a hook.
    """
    found: list[Any] = []
    for module in modules:
        found += [len(vars(module)[kind]) for kind in _OF_MODULES]
        found.append("forward" in vars(module))
    return found + list(map(is_hooked, parameters))
