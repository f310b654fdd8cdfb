"""ShardReducer: takes over the gradients that ``fully_shard`` has summed, and sums what is beside
them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError
from lockstep.launch.world import World
from lockstep.model.losses.loss import Number
from lockstep.strategies.ranks.reducers import FlatReducer
from lockstep.strategies.sharded.block_hooks import BlockWatch
from lockstep.strategies.sharded.shards import Shards


class ShardReducer(FlatReducer):
    """Gives each local parameter this rank's part of its gradient, after backward.

    Parameters that every rank has whole are summed flat, with the numbers beside them.

    Args:
        model: the model that was cut.
        shards: of the model.
        watch: knows which parameters got a gradient on this rank.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, shards: Shards, watch: BlockWatch, world: World) -> None:
        super().__init__(model, world)
        self._shards = shards
        self._watch = watch
        self._names = {p: name for name, p in shards.local.items()}

    def sum(self, parameters: list[nn.Parameter], numbers: list[Number]) -> Iterable[Number]:
        """Leave this rank's part of the sum in every ``parameter.grad``.

        A parameter that no rank used has no gradient.
        """
        cut = {}
        whole = []
        for p in parameters:
            if p in self._names:
                cut[self._names[p]] = p
            else:
                whole.append(p)
        for name, ranks in zip(cut, self._uses(list(cut)), strict=True):
            cut[name].grad = self._gradient(name) if ranks else None
        return super().sum(whole, numbers)

    def _uses(self, names: list[str]) -> list[float]:
        """Count the ranks that used each parameter, and make sure that all called the same blocks.

        Args:
            names: of the parameters, the same on all ranks.

        Raises:
            StrategyError: ranks have come to other blocks, or in another order.
        """
        order = self._watch.order
        flags = [float(name in self._watch.used) for name in names]
        flags += [order, order**2]
        place = self._world.exchange_device
        found = self._world.all_reduce(torch.tensor(flags, dtype=torch.float64, device=place))
        *uses, orders, squares = found.tolist()
        if self._world.size * int(squares) != int(orders) ** 2:
            raise StrategyError(
                "fsdp: ranks called different blocks in this update, or the same blocks in another "
                "order: blocks that depend on the samples can't be gathered on their own",
                fix='name the other blocks: --blocks NAMES, or FSDP(blocks=...); blocks="" gathers '
                "the whole model at once",
            )
        return uses

    def _gradient(self, name: str) -> torch.Tensor:
        """Return this rank's part of a gradient, in the memory that ``fully_shard`` has summed in.

        Args:
            name: of a parameter that some rank used.

        Raises:
            StrategyError: ``fully_shard`` has not summed the gradient.
        """
        grad = self._shards.cut[name].grad
        if not isinstance(grad, DTensor):
            raise StrategyError(
                f'fsdp: the gradient of "{name}" was not summed over the ranks: take ddp'
            )
        return grad.to_local()
