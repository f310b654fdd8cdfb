"""How a model computes while its sums are compared: known layers in evaluation mode, without
autocast or compiled code, and in float64 where that has to decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.modes import draws_dropout, is_spectral_norm
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
    of 1. Spectral norms keep their vectors. Dropout leaves nothing out, also where a module has its
    rate, as attention and RNNs do.
    """
    like = next(model.parameters(), torch.zeros(()))
    before = []
    try:
        for module in model.modules():
            for name, value in _in_evaluation(module, like).items():
                before.append((module, name, getattr(module, name)))
                setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _in_evaluation(module: nn.Module, like: Tensor) -> dict[str, Any]:
    """Give the attributes that a module has in evaluation, as far as they are other ones."""
    if not isinstance(module, _KNOWN) and not is_spectral_norm(module):
        if draws_dropout(module) and "dropout" in vars(module):
            return {"dropout": 0.0}
        return {}
    found: dict[str, Any] = {"training": False}
    if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
        found["running_mean"] = like.new_zeros(module.num_features)
        found["running_var"] = like.new_ones(module.num_features)
    return found


@contextlib.contextmanager
def as_compared(model: nn.Module, *, trains: bool) -> Iterator[None]:
    """Compute without autocast, also a caller's, and without compiled code, with known layers in
    evaluation mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(trains))
        stack.enter_context(known_in_evaluation_mode(model))
        for device_type in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def in_float64(*objects: Any) -> Iterator[None]:
    """Put the modules among some objects in float64 for a while: parameters, buffers, and tensors
    in attributes.
    """
    models = nn.ModuleList(one for one in objects if isinstance(one, nn.Module))
    parameters = [(p, p.data) for p in models.parameters()]
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in models.modules():
        for owner in (module._buffers, vars(module)):
            found = [(key, value) for key, value in owner.items() if isinstance(value, Tensor)]
            held += [(owner, key, value) for key, value in found]
    try:
        for p, data in parameters:
            p.data = doubled(data)
        for owner, key, value in held:
            owner[key] = doubled(value)
        yield
    finally:
        for p, data in parameters:
            p.data = data
        for owner, key, value in held:
            owner[key] = value
