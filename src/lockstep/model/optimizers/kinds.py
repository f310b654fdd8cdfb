"""What kind of optimizer one is: of PyTorch, hooked, with modes, with a state of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.model.optimizers.several import Optimizers, optimizers_in


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Find the optimizers that have ``train()`` and ``eval()``, which write the parameters.

    Schedule-free optimizers have them: in training the parameters are the point where gradients
    are computed, in evaluation the average that is the result.
    """
    return [
        one for one in optimizers_in(optimizer) if hasattr(one, "train") and hasattr(one, "eval")
    ]


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a ``state_dict`` and a ``load_state_dict`` of its own."""
    kind = type(optimizer)
    base = torch.optim.Optimizer
    if kind.state_dict is base.state_dict:
        return False
    return kind.load_state_dict is not base.load_state_dict


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether ``step`` may draw random numbers.

    It may where the optimizer is a person's own class, or calls a person's hooks.
    """
    if isinstance(optimizer, Optimizers):
        optimizer = optimizer.by_name[optimizer.active]
    return not is_of_pytorch(optimizer) or is_hooked(optimizer)


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step does more than the optimizer's class does, by hooks or another
    ``step``.
    """
    hooks = (  # an optimizer made of others may have no hooks
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(hooks):
        return True
    own = vars(optimizer).get("step")
    if own is None:
        return False
    is_wrapped_by_scheduler = hasattr(own, "_wrapped_by_lr_sched")
    wraps_class_step = getattr(own, "__wrapped__", None) is type(optimizer).step
    return not (is_wrapped_by_scheduler and wraps_class_step)


def is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's class is one of PyTorch's own."""
    # Adafactor's module is "torch.optim" itself.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")
