"""The whole model of which each rank has a shard, for rank 0 to inspect: a copy without values,
and what fills it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError, told
from lockstep.launch.events import Caveat
from lockstep.model.inspection import attribute_place, attribute_prints, detached_attributes
from lockstep.strategies.sharded.shards import places_of

LATER = Caveat(
    "uncopied",
    "hooks, modules or forward of the model are others than when it was cut into shards, and rank "
    "0 inspects a copy "
    "from before: what they make of the samples isn't seen",
    "put them in where the model is built, or before lockstep.parallelize",
)


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy without the values of parameters, which takes no memory for them.

    Raises:
        StrategyError: the model can't be copied.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise StrategyError(
            f"fsdp: the model can't be copied ({told(error)}), and rank 0 inspects a copy"
        ) from error


def put_together(
    skeleton: nn.Module | None,
    parameters: Iterable[tuple[str, nn.Parameter, torch.Tensor]],
    sharded: nn.Module,
) -> nn.Module | None:
    """A copy of the skeleton with the sharded model's buffers, attributes and modes; None without a
    skeleton.

    Args:
        skeleton: what ``skeleton_of`` gave.
        parameters: the name of each, what this rank has of it, and all of it; all ranks go through
            them.
        sharded: the model.

    Raises:
        StrategyError: the sharded model has other modules by now.
    """
    wholes = {}
    for name, mine, value in parameters:  # one at a time: the other ranks forget it at once
        if skeleton is not None:
            value = value.detach().clone() if value is mine else value
            wholes[name] = nn.Parameter(value, requires_grad=mine.requires_grad)
    if skeleton is None:
        return None
    was, now = ({name for name, _ in one.named_modules()} for one in (skeleton, sharded))
    if was != now:
        raise StrategyError(
            f'fsdp: the model\'s layer "{min(was ^ now)}" was put in or taken out after it was '
            "built, and rank 0 "
            "inspects a copy from before",
            fix="do it where the model is built, or take ddp",
        )
    model = copy.deepcopy(skeleton)
    places = places_of(model)
    for name, p in wholes.items():
        for module, key in places[name]:
            setattr(module, key, p)
    for module, here in zip(model.modules(), sharded.modules(), strict=True):
        module.training = here.training
        for key, buffer in here._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.clone()
    _follow_attributes(model, sharded)
    return model


def _follow_attributes(model: nn.Module, sharded: nn.Module) -> None:
    """Give the copy what forward, or a person, has made of other attributes since; what can't be
    copied stays.
    """
    memo: dict[int, Any] = detached_attributes(sharded)
    for of in (nn.Module.named_modules, nn.Module.named_parameters, nn.Module.named_buffers):
        theirs = dict(of(model))
        memo |= {id(mine): theirs[name] for name, mine in of(sharded) if name in theirs}
    before = attribute_prints(model)
    for name, its in attribute_prints(sharded).items():
        if before.get(name) != its:
            (mine, own), (attributes, _) = (
                attribute_place(sharded, name),
                attribute_place(model, name),
            )
            with contextlib.suppress(Exception):
                attributes[own] = copy.deepcopy(mine[own], known := dict(memo))
                memo = known  # what several modules share is one thing in the copy, too
