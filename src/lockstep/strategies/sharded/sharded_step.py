"""ShardedStep: one rank's local batch, and its shard of the model, its gradients and its
optimizer's state.

All ranks have to come to the same blocks in the same order, since each gathers the block's
parameters there. So a rank whose local batch is empty computes the first rank's sample, times zero.
Gradients of every micro-batch are summed at once, so no rank holds more than one block's whole
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizers.gradients import gradient_values, scale_to_norm
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.rank_step import RankStep
from lockstep.strategies.sharded.block_hooks import BlockWatch, during
from lockstep.strategies.sharded.rank_without_samples import stand_in_for, standing_in
from lockstep.strategies.sharded.shard_reducer import ShardReducer
from lockstep.strategies.sharded.sharded_evaluator import ShardedEvaluator, explain_shards
from lockstep.strategies.sharded.shards import refuse_hooks
from lockstep.strategies.sharded.whole_parameters import OF_OWN_LOOP, ShardedLayout
from lockstep.strategies.steps.update_result import added
from lockstep.threads.replica_collectives import RankExchange


class ShardedStep(RankStep):
    """One rank's local batch, and its shard of the model.

    Args:
        model: the model that was cut.
        optimizer: of this rank's parts of the parameters.
        job: how an update is computed.
        world: the ranks.
        exchange: between the batch norms of the ranks; None where they aren't synchronised.
        shards: of the model.
        elementwise: whether the optimizer treats each element of a parameter by itself.

    Attributes:
        shards: of the model.
        watch: finds what forward and backward do with gathered parameters.
    """

    of_own_loop = (OF_OWN_LOOP,)
    _evaluator_kind = ShardedEvaluator

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: RankExchange | None,
        shards: ShardedLayout,
        elementwise: bool,
    ) -> None:
        self.shards = shards
        super().__init__(model, optimizer, job, world, exchange)
        self._waits_in_backward = True
        self.accumulation.why_whole = (
            "fsdp: step.backward(...) isn't supported: call step(inputs, targets), with "
            "parallelize(accumulate=...) for several micro-batches, or take ddp"
        )
        self._needs_first_ranks = "fsdp"
        self._elementwise = elementwise
        self.watch = BlockWatch(model, shards)
        self.reducer = ShardReducer(model, shards, self.watch, world)
        self.loss.within = functools.partial(during, "loss")
        self.layout: ShardedLayout = shards

    def _own_parameters(self) -> Mapping[str, nn.Parameter]:
        """Give the shard of each parameter, which the optimizer has, or the whole of one that isn't
        cut.
        """
        return self.shards.mine

    def _look_at_flags(self) -> None:
        """Refuse an update while parameters are whole, and hooks that an optimizer has got.

        Raises:
            InputError: parameters are whole.
            StrategyError: the optimizer has hooks.
        """
        if self.layout.are_gathered:
            raise InputError(
                "step(...) was called within step.whole_parameters(): call it after the with block"
            )
        if not self._elementwise:
            refuse_hooks(self.optimizer)
        super()._look_at_flags()

    # ---- an update -------------------------------------------------------------------------------

    def _local_gradients(self, batch: Batch) -> Loss:
        """Leave the gradients of this rank's local batches; without gradients, free what is in no
        block, which backward frees otherwise.
        """
        loss = super()._local_gradients(batch)
        if not torch.is_grad_enabled():
            self.shards.reshard()
        return loss

    def _add_parts(self, batch: Batch) -> Loss:
        """Leave the gradients of this rank's local batches, and return the sum of their losses.

        ``fully_shard`` sums them over the ranks meanwhile.
        """
        for p in (*self.trained.values, *self.shards.cut.values()):
            p.grad = None
        self.watch.begin()
        losses: list[Loss] = []
        # In a loop of one's own no rank may have a sample of a part.
        parts = [part for part in batch.parts if part.of]
        for number, part in enumerate(parts):
            self._begin_exchange(part)
            self.draws.begin_part(number)
            other = stand_in_for(part, self.world)
            if other is not None:
                self._compute_in_vain(other)
                continue
            loss = self._forward_loss(self.model, self.placed(part))
            losses.append(self._backward(loss, batch.size))
        return added(losses)

    def _compute_in_vain(self, part: Part) -> None:
        """Compute forward and backward of another rank's sample, times zero.

        So this rank takes part in each collective.
        """
        part = self.placed(part)
        used = set(self.watch.used)
        with standing_in(self.model):
            _, loss = self._outputs_and_loss(self.model, part)
            if loss.total.requires_grad:
                self._add_gradient(loss.total, 0)
        self.watch.used = used

    @phase("computing", "clip")
    def _clip(self, clip_norm: float) -> None:
        """Keep the norm of all gradients together at ``clip_norm`` or less."""
        self.grad_norm = self._norm()
        values = gradient_values(self.trained.values)
        scale_to_norm(values, self.grad_norm, clip_norm)

    def _norm(self) -> torch.Tensor:
        """Compute the norm of all gradients together; every rank calls this.

        Each element is counted by one rank: a shard by the first replica, a whole gradient by the
        first rank.
        """
        counted = []
        for name, p in zip(self.trained.names, self.trained.values, strict=True):
            counts = self.shards.is_first_replica
            if name in self.shards.uncut:
                counts = self.world.is_first
            if counts:
                counted.append(p)
        norm = nn.utils.get_total_norm(gradient_values(counted))
        square = norm.to(self.world.device.torch, torch.float64).square()
        return self.world.all_reduce(square).sqrt()

    def _gradients_are_finite(self) -> bool:
        """Tell whether the shards of the gradients are finite on all ranks."""
        here = super()._gradients_are_finite()
        return min(over_ranks(self.world, here)) == [1]

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known, or is the shards."""
        explain_shards(error)
        super()._explain(error, batch)

    def _add_gradient(
        self, total: torch.Tensor, divisor: Number, inputs: list[nn.Parameter] | None = None
    ) -> None:
        """Add the gradient of ``total / divisor``; other backwards are refused."""
        with during("backward"):
            super()._add_gradient(total, divisor, inputs)

    # ---- the whole model -------------------------------------------------------------------------

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Give the parameters that couldn't be cut, which every rank has whole."""
        return [(name, self.shards.mine[name]) for name in self.shards.uncut]
