"""Training and evaluation mode of modules, of which some have a ``train`` of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Layers whose running statistics act in evaluation only."""


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set the mode of modules of which some may have a ``train`` of their own, which does more: it
    merges weights, say.

    What such a ``train`` leaves in evaluation mode stays so: it may have been told meanwhile to
    freeze a batch norm.

    Args:
        modes: each module, before those within it, and whether it is in training.
    """
    left = set[nn.Module]()
    for module, is_training in modes:
        if module in left:
            continue
        if not has_own_train(module):
            module.training = is_training
        elif module.training is not is_training:
            module.train(is_training)
            left.update(m for m in module.modules() if is_training and not m.training)


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        set_modes(modes)


def has_own_train(module: nn.Module) -> bool:
    """Whether its class has a ``train`` of its own."""
    return type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval


def draws_dropout(module: nn.Module) -> bool:
    """Whether a module is a layer that is known to draw dropout masks."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", None)
    return isinstance(rate, float) and rate > 0
