"""Copies of a model for other devices, and what a copy can't take along."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, StrategyError
from lockstep.launch.devices import Device
from lockstep.model.compile import refuse_compiled
from lockstep.model.hooks import hooked_parameters
from lockstep.tensors.placing import place_module
from lockstep.tensors.pytree import graph_nodes


def copied_model(model: nn.Module, device: Device, *, shares: bool) -> nn.Module:
    """Copy a model, with parameters of its own, which may share the storage of the first one's.

    Args:
        model: the model.
        device: of the copy.
        shares: whether the storage of the parameters is shared, else it is copied to the device.

    Raises:
        StrategyError: the copy has other parameters.
        JobError: the model can't be copied.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        storage = p.detach() if shares else p.detach().to(device.torch, copy=True)
        memo[id(p)] = nn.Parameter(storage, requires_grad=p.requires_grad)
    mine = set(memo.values())

    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise JobError(
            f"model: it can't be copied for {device}: {type(error).__name__}: {error}; ddp builds "
            "it afresh"
        ) from error
    if not mine.issuperset(made.parameters()):
        raise StrategyError(
            "dp: a copy of the model has parameters of its own (TorchScript?); take ddp, which "
            "builds it afresh"
        )
    if not device.is_slot:
        place_module(made, device.torch)
    return made


def refuse_uncopied(model: nn.Module, strategy: str) -> None:
    """Refuse what a copy of the model, or its shards, can't take along.

    Raises:
        StrategyError: a hook on a parameter, or a compiled model, which would run the first one.
    """
    for name in hooked_parameters(model):
        raise StrategyError(
            f'{strategy}: parameter "{name}" has a hook, which a copy or a shard would lose: take '
            "ddp, which builds the model afresh for each device"
        )
    refuse_compiled(model)


def refuse_other_parameters(total: torch.Tensor, model: nn.Module) -> None:
    """Refuse the loss of a replica whose graph comes to parameters of the first one, ``model``.

    Several threads would add to their gradients at the same time, and the replica's own parameters
    would miss them.

    Raises:
        StrategyError: the loss, or something that the model holds, uses them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for node in graph_nodes(total):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise StrategyError(
                f'dp: the loss, or something that the model holds, uses "{name}" of the model '
                "itself (by a global, a closure or a reference), not that of the replica",
                kind="state",
                fix="take ddp, which has no copies",
            )
