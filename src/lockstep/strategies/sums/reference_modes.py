"""How a model computes while its sums are compared: known layers in evaluation mode, without
autocast or compiled code, and in float64 where that has to decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.modes import draws_dropout
from lockstep.tensors.pytree import doubled

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_KNOWN = (
    _BATCH_NORMS,
    nn.modules.instancenorm._InstanceNorm,
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
)
"""Layers that are known to compute otherwise in training, and are in evaluation mode meanwhile."""


@contextlib.contextmanager
def known_in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Let known layers compute as in evaluation.

    Batch norms take their running statistics; those that have none take a mean of 0 and a variance
    of 1. Dropout leaves nothing out, also where a module has its rate, as attention and RNNs do.
    """
    modes: list[nn.Module] = []
    bare: list[Any] = []
    rates: list[tuple[Any, float]] = []
    for module in model.modules():
        if isinstance(module, _KNOWN):
            if module.training:
                modes.append(module)
            if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
                bare.append(module)
        elif draws_dropout(module) and "dropout" in vars(module):
            rates.append((module, vars(module)["dropout"]))
    for module in modes:
        module.training = False
    for module, _ in rates:
        module.dropout = 0.0
    like = next(model.parameters(), torch.zeros(()))
    for module in bare:
        mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
        module.running_mean = mean
        module.running_var = torch.ones_like(mean)
    try:
        yield
    finally:
        for module in modes:
            module.training = True
        for module, rate in rates:
            module.dropout = rate
        for module in bare:
            module.running_mean = module.running_var = None


@contextlib.contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Compute without autocast, also a caller's, and without compiled code."""
    with contextlib.ExitStack() as stack:
        for device_type in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """The model itself in float64 for a while: parameters, buffers, and tensors in attributes."""
    parameters = [(p, p.data) for p in model.parameters()]
    owners = []
    for module in model.modules():
        for owner in (module._buffers, vars(module)):
            held = {key: value for key, value in owner.items() if isinstance(value, Tensor)}
            owners.append((owner, held))
    try:
        for p, data in parameters:
            p.data = doubled(data)
        for owner, held in owners:
            owner.update(doubled(held))
        yield
    finally:
        for p, data in parameters:
            p.data = data
        for owner, held in owners:
            owner.update(held)
