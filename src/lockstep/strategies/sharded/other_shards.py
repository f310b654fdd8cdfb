"""Refuse a loss that uses a model which another step has sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError


def refuse_other_shards(loss: Any, cut: Mapping[str, nn.Parameter]) -> None:
    """Refuse a loss that holds, or closes over, a model that another step has sharded.

    Not every rank calls the loss as often, so the ranks would wait for one another.

    Args:
        loss: a function or a module.
        cut: the parameters of this step's model.

    Raises:
        StrategyError: it does.
    """
    held = getattr(loss, "__dict__", {})
    closure = getattr(loss, "__closure__", None) or ()
    objects = [*held.values(), *(cell.cell_contents for cell in closure)]
    if isinstance(loss, nn.Module):
        objects += loss.children()

    own = {id(p) for p in cut.values()}
    for module in objects:
        for name, p in module.named_parameters() if isinstance(module, nn.Module) else ():
            if isinstance(p, DTensor) and id(p) not in own:
                raise StrategyError(
                    f'fsdp: the loss uses "{name}" of a model that another step has sharded, and '
                    "ranks would wait for one another in it",
                    fix="take ddp for both",
                )
