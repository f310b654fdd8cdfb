"""ShardedEvaluator: evaluates a sharded model, in which all ranks come to each block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.own_batches import batch_of
from lockstep.errors import StrategyError
from lockstep.model.losses.loss import Number
from lockstep.strategies.sharded.rank_without_samples import stand_in_for, standing_in
from lockstep.strategies.steps.evaluator import Evaluator

if TYPE_CHECKING:
    from lockstep.strategies.sharded.sharded_step import ShardedStep

T = TypeVar("T")


class ShardedEvaluator(Evaluator):
    """Evaluates shards; a rank without samples computes one of another rank."""

    _step: ShardedStep

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in this context, and free what is in no block afterwards.

        Training frees it in backward.
        """
        with super().evaluating():
            try:
                yield
            finally:
                if not self._step.layout.are_gathered:
                    self._step.shards.reshard()

    def of_each(
        self,
        function: Callable[[nn.Module, Part], T],
        batch: Batch,
    ) -> list[tuple[Part, T]]:
        """Call a function for this rank's samples; without any, compute others for the gathers.

        Raises:
            StrategyError: the function uses a parameter outside of the block's forward.
        """
        step = self._step
        other = stand_in_for(batch.parts[0], step.world)
        try:
            if other is None:
                return super().of_each(function, batch)
            with standing_in(step.model):
                self.predicted(step.model, step.placed(other))
        except RuntimeError as error:
            explain_shards(error)
            raise
        return []

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Compute outputs, total and count of this rank's share; every rank calls this."""
        if isinstance(inputs, Batch):
            inputs, targets = inputs
        step = self._step
        with self.evaluating():
            batch = batch_of(inputs, targets, 1, step.world, step._refuse_gaps)
            if batch.parts[0].of:
                for outputs, _, loss in self.results(batch):
                    return outputs, loss.total, loss.count
            return None, 0.0, 0


def explain_shards(error: Exception) -> None:
    """Raise an error that explains one of PyTorch's on shards.

    Args:
        error: any error of forward, loss or backward; one that isn't about shards is left alone.

    Raises:
        StrategyError: a model or a loss uses a parameter outside of the block's forward.
    """
    if "mixed torch.Tensor and DTensor" in str(error):
        raise StrategyError(
            "fsdp: a parameter of a block is used outside of the block's forward, where it is a "
            "shard",
            fix="name blocks whose parameters only they use: --blocks NAMES, or "
            "FSDP(blocks=...); or take ddp",
        ) from error
