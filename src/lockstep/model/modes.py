"""Training and evaluation mode of modules, and which modules act in training only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

NORMS = (_BatchNorm, _InstanceNorm)
"""Layers whose running statistics act in evaluation only."""


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set the mode of modules, by a module's own ``train`` where its class has one.

    Such a ``train`` may do more than set the mode (merge weights, say). Modules that it leaves in
    evaluation mode stay so: it may freeze a batch norm.

    Args:
        modes: each module, before those within it, and whether it is in training.
    """
    left_in_evaluation = set[nn.Module]()
    for module, is_training in modes:
        if module in left_in_evaluation:
            continue
        if not has_own_train(module):
            module.training = is_training
        elif module.training is not is_training:
            module.train(is_training)
            if is_training:
                left_in_evaluation.update(m for m in module.modules() if not m.training)


def has_own_train(module: nn.Module) -> bool:
    """Return whether a module's class has a ``train`` or an ``eval`` of its own."""
    kind = type(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def draws_dropout(module: nn.Module) -> bool:
    """Return whether a module is a dropout layer, or has a rate of dropout as PyTorch's RNNs do."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", None)
    return isinstance(rate, float) and rate > 0


def is_spectral_norm(module: nn.Module) -> bool:
    """Return whether a module is a spectral norm, or a layer with one, which iterates in training."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


def normalizes_by_batch(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that takes the statistics of what its forward sees."""
    if not isinstance(module, _BatchNorm):
        return False
    return module.training or module.running_mean is None
