"""The fused implementations of PyTorch: where they are right, and what they need."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.model.optimizers.several import optimizers_in

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that have a fused implementation, where they were given none."""

_FUSED_ON = ("cpu", "cuda", "mps", "xpu")
"""Types of device that have the kernels."""


def sparse_parameters(model: nn.Module) -> set[int]:
    """Find the ids of weights whose gradients are sparse, those of embeddings with
    ``sparse=True``.
    """
    return {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) is True}


def can_be_fused(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    on: str | None,
    wanted: bool,
) -> bool:
    """Return whether PyTorch has a fused implementation of this optimizer for these parameters.

    Args:
        optimizer: just made.
        model: has the parameters.
        on: the type of the devices that the parameters will be on; None if they are there already.
        wanted: whether the person asked for it; then ``amsgrad`` is no obstacle.
    """
    if type(optimizer) not in _FUSED or sparse_parameters(model):
        return False
    parameters = [p for p in model.parameters() if p.requires_grad]
    devices = {on or p.device.type for p in parameters}
    if not devices.issubset(_FUSED_ON):
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        if group.get("amsgrad") and not wanted:
            return False
    # The kernel of SGD on CPU skips whole vectors of parameters of 16 bits (torch 2.13).
    refuses_halves = type(optimizer) is torch.optim.SGD and "cpu" in devices
    for p in parameters:
        if not p.is_floating_point() or p.layout != torch.strided:
            return False
        # The kernels on CPU go by address, and are silently wrong where a parameter has gaps.
        if torch.empty_like(p).stride() != p.stride():
            return False
        if refuses_halves and p.itemsize == 2:
            return False
    return True


def fuse(optimizer: torch.optim.Optimizer, *, wanted: bool) -> None:
    """Switch to the fused implementation.

    Groups with dampening keep theirs: momentum that begins at zero would have other numbers then.
    """
    for group in optimizer.param_groups:
        chosen = [group.get("foreach"), group.get("fused")]
        if chosen != [None, None] and not wanted:  # a person's choice is kept
            continue
        if group.get("dampening"):
            continue
        group["foreach"] = False
        group["fused"] = True
    if all(group["fused"] for group in optimizer.param_groups):
        # The constructor would set it. The kernel then detects an overflow of fp16, not the host.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    begin_momentum(optimizer)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin the momentum of every parameter of a fused SGD at once, at zero.

    PyTorch's fused SGD can't begin the momentum of one parameter later than another's (one that was
    unused in the first step). Without dampening, momentum that begins at zero gives the same
    numbers.
    """
    for one in optimizers_in(optimizer):
        if not isinstance(one, torch.optim.SGD):
            continue
        for group in one.param_groups:
            if not group["fused"] or not group["momentum"]:
                continue
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                state = one.state[p]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(p)
