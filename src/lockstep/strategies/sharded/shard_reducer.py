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
from lockstep.strategies.steps.weighting import as_tensor


class ShardReducer:
    """Gives each local parameter this rank's part of its gradient, after backward.

    Parameters that every rank has whole are summed by a reducer of their own.

    Args:
        model: the model that was cut.
        shards: of the model.
        watch: knows which parameters got a gradient on this rank.
        world: the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Shards,
        watch: BlockWatch,
        world: World,
    ) -> None:
        self._shards = shards
        self._watch = watch
        self._world = world
        self._names = {p: name for name, p in shards.local.items()}
        self._parameters: list[nn.Parameter] | None = None
        self._cut: list[str] = []
        self._whole: list[nn.Parameter] = []
        self._of_whole = FlatReducer(model, world)

    def sum(self, parameters: list[nn.Parameter], numbers: list[Number]) -> Iterable[Number]:
        """Leave this rank's part of the sum in every ``parameter.grad``.

        A parameter that no rank used has no gradient.
        """
        if self._parameters is not parameters:
            self._follow(parameters)
        sums, uses = self._sum_numbers(numbers)
        for name, ranks in zip(self._cut, uses, strict=True):
            self._take_gradient(name, is_used=ranks > 0)
        if self._whole:
            self._of_whole.sum(self._whole, [0.0])
        return sums

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Take note of which parameters are trained.

        Args:
            parameters: the local ones of those that were cut, and whole ones.
        """
        self._parameters = parameters
        self._cut = []
        self._whole = []
        for p in parameters:
            name = self._names.get(p)
            if name is None:
                self._whole.append(p)
            else:
                self._cut.append(name)

    def _sum_numbers(self, numbers: list[Number]) -> tuple[Iterable[Number], list[float]]:
        """Sum numbers over the ranks, and make sure that all have come to the same blocks.

        Args:
            numbers: of the loss, and how many ranks were asked to stop.

        Returns:
            The sums of the numbers, and how many ranks used each parameter that was cut.

        Raises:
            StrategyError: ranks have come to other blocks, or in another order.
        """
        world = self._world
        order = self._watch.order
        flags = [float(name in self._watch.used) for name in self._cut]
        flags += [order, order**2]
        beside = torch.tensor(flags, dtype=torch.float64)
        of_loss = as_tensor(numbers, world.device.torch)
        sums: Iterable[Number]
        if world.device.is_slot:
            together = torch.cat([of_loss, beside])
            found = world.all_reduce(together).tolist()
            sums = found[: len(numbers)]
            found = found[len(numbers) :]
        else:
            # The host doesn't wait for the sums of the loss.
            sums = world.all_reduce(of_loss)
            beside = beside.to(world.exchange_device)
            found = world.all_reduce(beside).tolist()

        *uses, orders, squares = found
        if world.size * int(squares) != int(orders) ** 2:
            raise StrategyError(
                "fsdp: ranks called different blocks in this update, or the same blocks in another "
                "order: blocks that depend on the samples can't be gathered on their own",
                fix='name the other blocks: --blocks NAMES, or FSDP(blocks=...); blocks="" gathers '
                "the whole model at once",
            )
        return sums, uses

    def _take_gradient(self, name: str, *, is_used: bool) -> None:
        """Give a local parameter its gradient, in the memory that ``fully_shard`` has summed in.

        Args:
            name: of the parameter.
            is_used: whether any rank used the parameter; ``fully_shard`` makes zeros otherwise.

        Raises:
            StrategyError: ``fully_shard`` has not summed the gradient.
        """
        p = self._shards.cut[name]
        local = self._shards.local[name]
        if not is_used:
            p.grad = None
            local.grad = None
            return
        if not isinstance(p.grad, DTensor):
            raise StrategyError(
                f'fsdp: the gradient of "{name}" was not summed over the ranks: take ddp'
            )
        local.grad = p.grad.to_local()
