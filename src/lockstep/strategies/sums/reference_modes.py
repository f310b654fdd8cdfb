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
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _KNOWN):
                stack.enter_context(_with_attribute(module, "training", value=False))
                if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
                    stack.enter_context(_with_statistics(module, model))
            elif draws_dropout(module) and "dropout" in vars(module):
                stack.enter_context(_with_attribute(module, "dropout", value=0.0))
        yield


@contextlib.contextmanager
def _with_attribute(module: nn.Module, name: str, *, value: Any) -> Iterator[None]:
    """Give an attribute of a module another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _with_statistics(norm: Any, model: nn.Module) -> Iterator[None]:
    """Give a batch norm running statistics for a while: a mean of 0 and a variance of 1."""
    like = next(model.parameters(), torch.zeros(()))
    norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
    norm.running_var = torch.ones_like(norm.running_mean)
    try:
        yield
    finally:
        norm.running_mean = norm.running_var = None


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
