"""ShardedAccumulation: the parts of an update whose gradients are shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.data import Batch
from lockstep.data.shares import over_ranks
from lockstep.model.losses.loss import Loss
from lockstep.strategies.steps.manual_accumulation import ManualAccumulation

if TYPE_CHECKING:
    from lockstep.strategies.sharded.sharded_step import ShardedStep


class ShardedAccumulation(ManualAccumulation):
    """The model's parameters show the gradients of all parts; a loop may give them others."""

    _step: ShardedStep

    def add(self, batch: Batch) -> Loss:
        """Add a part of an update, and give the model's parameters the gradients of all parts."""
        loss = super().add(batch)
        self._step.shards.show_gradients()
        return loss

    def are_thrown_away(self) -> bool:
        """Return whether every gradient was written since, and is 0 or gone, on all ranks alike.

        A rank that has no row of any parameter has no say.
        """
        self._step.shards.take_gradients()
        has_some = False
        for was, _ in self.left:
            if was is not None and was.numel():
                has_some = True
        is_thrown_away = super().are_thrown_away()
        votes = over_ranks(self._step.world, has_some, is_thrown_away)
        on_ranks = [theirs for has_say, theirs in votes if has_say]
        return bool(on_ranks) and all(on_ranks)

    def take(self) -> tuple[Batch, Loss]:
        """Give the size and the loss of all parts; the shards take their gradients."""
        if self.losses:
            self._step.shards.take_gradients()
        return super().take()
