"""Hooks on parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.launch.events import Caveat

PARAMETER_HOOKS = Caveat(
    "hook",
    "hooks on parameters see the gradient of a local batch, before it is summed and weighted",
)


def hooked_parameters(model: nn.Module) -> list[str]:
    """The names of parameters with a hook on their gradient, of either kind."""
    return [name for name, p in model.named_parameters() if is_hooked(p)]


def is_hooked(p: torch.Tensor) -> bool:
    """Whether a parameter has a hook on its gradient, of either kind, but for those of
    ``fully_shard``.
    """
    hooks = len(p._backward_hooks or {}) - len(hooks_of_shards(p))
    return bool(hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def hooks_of_shards(p: torch.Tensor) -> list[int]:
    """The keys of the hooks that ``fully_shard`` sets on outputs, in each forward: a parameter
    keeps them.
    """
    hooks: Mapping[int, Any] = p._backward_hooks or {}
    return [
        key
        for key, hook in hooks.items()
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
    ]


_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def structure_of(model: nn.Module) -> list[Any]:
    """What copies of a model lack when it changes: its modules and parameters, and their hooks."""
    found: list[Any] = []
    for module in model.modules():
        hooks = [len(getattr(module, kind)) for kind in _OF_MODULES]
        found.append((id(module), id(vars(module).get("forward")), hooks))
    found += [(id(p), is_hooked(p)) for p in model.parameters()]
    return found
