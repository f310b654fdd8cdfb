"""Refuse what an optimizer must not do that holds a rank's parts of parameters."""

from __future__ import annotations

import torch

from lockstep.errors import StrategyError
from lockstep.model.optimizers.kinds import is_hooked


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of shards that has hooks on its step.

    Raises:
        StrategyError: it has one.
    """
    if is_hooked(optimizer):
        raise StrategyError(
            "fsdp: the optimizer has hooks on its step (or another step in its place), which "
            "would be given a shard of each gradient and parameter: where they treat each element "
            "by itself, say so by --elementwise true (FSDP(elementwise=True)), or take ddp"
        )
