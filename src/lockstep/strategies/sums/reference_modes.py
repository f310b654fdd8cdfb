"""How a model computes while its sums are compared: known layers in evaluation mode, without
autocast or compiled code, and in float64 where that has to decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.tensors.pytree import doubled

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_KNOWN = (_BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.RReLU)
"""Layers that are known to compute otherwise in training, and are in evaluation mode meanwhile."""


@contextlib.contextmanager
def known_in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Batch norms take their running statistics; those that have none take a mean of 0 and a
    variance of 1.
    """
    every = [module for module in model.modules() if isinstance(module, _KNOWN)]
    known = [module for module in every if module.training]
    bare = [m for m in every if isinstance(m, _BATCH_NORMS) and m.running_mean is None]
    for module in known:
        module.training = False
    for norm in bare:
        like = next(model.parameters(), torch.zeros(()))
        norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
        norm.running_var = torch.ones_like(norm.running_mean)
    try:
        yield
    finally:
        for module in known:
            module.training = True
        for norm in bare:
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
    owners = [owner for module in model.modules() for owner in (module._buffers, vars(module))]
    held = [
        (owner, {key: its for key, its in owner.items() if isinstance(its, Tensor)})
        for owner in owners
    ]
    try:
        for p, data in parameters:
            p.data = doubled(data)
        for owner, before in held:
            owner.update({key: doubled(tensor) for key, tensor in before.items()})
        yield
    finally:
        for p, data in parameters:
            p.data = data
        for owner, before in held:
            owner.update(before)
