"""Whether a backward may be other than linear: twice the gradient that it begins with, another than
twice the result.

Hooks on parameters and on tensors, and autograd functions of a person's own, may do anything:
clamp, count, draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lockstep.launch.events import Caveat
from lockstep.tensors.pytree import graph_nodes

PARAMETER_HOOKS = Caveat(
    "hook",
    "hooks on parameters see the gradient of a local batch, before it is summed and weighted",
)


class NoticedHooks(TorchFunctionMode):
    """Notices ``tensor.register_hook`` within the context.

    Attributes:
        found: whether it was called.
    """

    found = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.found |= func is torch.Tensor.register_hook
        return func(*args, **(kwargs or {}))


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


def may_be_nonlinear(model: nn.Module, total: torch.Tensor, hooks: NoticedHooks) -> bool:
    """Whether the backward of ``total`` may be, of a forward within ``hooks``."""
    if hooks.found or hooked_parameters(model):
        return True
    return any(isinstance(node, BackwardCFunction) for node in graph_nodes(total))


def own_functions(outputs: Any) -> set[str]:
    """The autograd functions in the graph of some outputs that are written in Python: their
    names.
    """
    kinds: set[Any] = {getattr(node, "_forward_cls", None) for node in graph_nodes(outputs)} - {
        None
    }
    return {
        kind.__name__ for kind in kinds if not kind.__module__.startswith(("torch.", "lockstep."))
    }
