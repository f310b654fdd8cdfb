"""What an optimizer that holds this rank's parts of parameters must not do, and what is logged
of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lockstep.errors import StrategyError
from lockstep.launch.events import Caveat
from lockstep.model.inspection import NotedDraws
from lockstep.model.optimizer import is_hooked, may_draw


@contextlib.contextmanager
def noted_draws(optimizer: torch.optim.Optimizer, *, looks: bool) -> Iterator[list[Caveat]]:
    """The optimizer makes its step in this context; the list has a caveat afterwards where the
    step drew numbers.
    """
    caveats: list[Caveat] = []
    if not looks or not may_draw(optimizer):
        yield caveats
        return
    with NotedDraws() as noted:
        yield caveats
    if noted.drew:
        text = (
            "the optimizer draws random numbers for each rank's shard of a parameter, the same "
            "ones on all ranks"
        )
        caveats.append(Caveat("drawing", f"{text}: other ones than on one device", "take ddp"))


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of shards that has hooks on its step.

    Raises:
        StrategyError: it has.
    """
    if is_hooked(optimizer):
        raise StrategyError(
            "fsdp: the optimizer has hooks on its step (or another step in its place), which "
            "would be given a shard of "
            "each gradient and parameter: where they treat each element by itself, say so by "
            "--elementwise true "
            "(FSDP(elementwise=True)), or take ddp"
        )
