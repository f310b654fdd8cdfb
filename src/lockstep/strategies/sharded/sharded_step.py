"""ShardedStep: one rank's local batch, and its shard of the model, its gradients and its
optimizer's state.

All ranks have to come to the same blocks in the same order, since each gathers the block's
parameters there. So a rank whose local batch is empty computes the first rank's sample, times zero.
Gradients of every micro-batch are summed at once, so no rank holds more than one block's whole
gradients, unless the strategy says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.own_batches import batch_of
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, StrategyError
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizers.gradients import gradient_values, scale_to_norm
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.rank_step import RankStep
from lockstep.strategies.sharded.block_watch import BlockWatch, during
from lockstep.strategies.sharded.optimizer_of_shards import refuse_hooks
from lockstep.strategies.sharded.shard_reducer import ShardReducer
from lockstep.strategies.sharded.sharded_layout import ShardedLayout
from lockstep.strategies.sharded.shards import Shards
from lockstep.strategies.sharded.whole_parameters import OF_OWN_LOOP
from lockstep.strategies.sharded.without_a_trace import without_a_trace
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.manual_accumulation import ManualAccumulation
from lockstep.strategies.steps.update_result import Result, added
from lockstep.tensors.pytree import to_device
from lockstep.threads.replica_collectives import RankExchange

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
                    self._step._shards.modules.reshard()

    def of_each(
        self, function: Callable[[nn.Module, Part], T], batch: Batch
    ) -> list[tuple[Part, T]]:
        """Call a function for this rank's samples; without any, compute others for the gathers."""
        self._step._watch.begin()
        part, is_stand_in = self._step._or_first_sample(batch.parts[0])
        try:
            if not is_stand_in:
                return super().of_each(function, batch)
            with self._step._standing_in():
                self.predicted(self._step.model, self._step.placed(part))
        except RuntimeError as error:
            _explain_shards(error)
            raise
        return []

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Outputs, total and count of this rank's share; every rank calls this."""
        if isinstance(inputs, Batch):
            inputs, targets = inputs
        with self.evaluating():
            batch = batch_of(inputs, targets, 1, self._step.world, self._step._refuse_gaps)
            if batch.parts[0].of:
                for _, (outputs, (total, count)) in self.of_each(self.judged, batch):
                    return outputs, total, count
            return None, 0.0, 0


class ShardedAccumulation(ManualAccumulation):
    """The parts of an update, whose gradients a loop of a person's own may have changed."""

    _step: ShardedStep

    def are_thrown_away(self) -> bool:
        """Whether every gradient was written since, and is 0 or gone, on all ranks alike."""
        self._step._shards.take_gradients()
        has = any(was is not None and was.numel() for was, _ in self.left)
        votes = over_ranks(self._step.world, has, super().are_thrown_away())
        return any(has for has, _ in votes) and all(yes or not has for has, yes in votes)

    def take(self) -> tuple[Batch, Loss]:
        """Give the size and the loss of all parts; the shards take their gradients."""
        if self.losses:
            self._step._shards.take_gradients()
        return super().take()


class ShardedStep(RankStep):
    """One rank's local batch, and its shard of the model."""

    of_own_loop = (OF_OWN_LOOP,)
    _evaluator_kind = ShardedEvaluator
    _accumulation_kind = ShardedAccumulation

    sync_each_microbatch = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: RankExchange | None,
        shards: Shards,
        elementwise: bool,
    ) -> None:
        self._shards = shards
        super().__init__(model, optimizer, job, world, exchange)
        self._waits_in_backward = True
        self._elementwise = elementwise
        self._watch = BlockWatch(model, shards, world)
        self.reducer = ShardReducer(model, shards, self._watch, world)
        self.loss.within = functools.partial(during, "loss")
        self.layout: ShardedLayout = ShardedLayout(model, optimizer, shards, world)

    def _own_parameters(self) -> Mapping[str, nn.Parameter]:
        """Give the shard of each parameter, which the optimizer has, or the whole of one that isn't
        cut.
        """
        return self._shards.mine

    def _look_at_flags(self) -> None:
        if self.layout.are_gathered:
            raise InputError(
                "step: it is called within step.whole_parameters(): call it after that"
            )
        if not self._elementwise:
            refuse_hooks(self.optimizer)
        super()._look_at_flags()

    # ---- an update -------------------------------------------------------------------------------

    def gradients(self, batch: Batch) -> Loss:
        """Sum gradients of total / size over micro-batches and ranks; this rank keeps its part."""
        for p in (*self.trained.values, *self._shards.cut.values()):
            p.grad = None
        self._watch.begin()
        self._buffers.follow()

        losses: list[Loss] = []
        # In a loop of one's own no rank may have a sample of a part.
        parts = [part for part in batch.parts if part.of]
        for number, part in enumerate(parts):
            if not self.sync_each_microbatch:
                with self._shards.modules.of_pytorch() as model:
                    model.set_requires_gradient_sync(number == len(parts) - 1)
            if self._exchange is not None:
                self._exchange.begin(min(part.of, self.world.size))
            self.draws.begin_part(number)
            part, is_stand_in = self._or_first_sample(part)
            if is_stand_in:
                self._compute_in_vain(part)
                continue
            loss = self._forward_loss(self.model, self.placed(part))
            losses.append(loss.detached())
            self._add_gradient(loss.total, self._divisor(loss.count, batch.size))

        loss = self._sum_over_ranks(added(losses), self.reducer)
        self._end_parts(batch)
        return loss

    def _or_first_sample(self, part: Part) -> tuple[Part, bool]:
        """Return the part and False, or where this rank has no sample, the first rank's and True.

        Every rank calls this.
        """
        if part.of >= self.world.size:
            return part, False
        first = part.inputs, part.targets
        if self._on_accelerator and self.world.is_first:
            # Else the other ranks would unpack it on this rank's device.
            first = to_device(first, torch.device("cpu"))
        inputs, targets, size = self.world.broadcast_object((*first, part.size))
        if part.size:
            return part, False
        return Part(inputs, targets, size, part.of), True

    def _compute_in_vain(self, part: Part) -> None:
        """Compute forward and backward of another rank's sample, times zero.

        So this rank takes part in each collective.
        """
        part = self.placed(part)
        with self._standing_in():
            with self._precision.autocast():
                loss = self.loss(self.forward(self.model, part), part.targets, part.size)
            self._add_gradient(loss.total, 0)

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Compute a sample of another rank in this context."""
        with during("stand-in"), without_a_trace(self.model):
            yield

    def backward(self, inputs: Any, targets: Any = None) -> Result:
        """Add a part of an update, and give the model's parameters the gradients of all parts."""
        result = super().backward(inputs, targets)
        self._shards.show_gradients()
        return result

    @phase("computing", "clip")
    def _clip(self, clip_norm: float) -> None:
        """Keep the norm of all gradients together at ``clip_norm`` or less.

        The square of the norm is summed over the ranks.
        """
        counted = []
        for name, p in zip(self.trained.names, self.trained.values, strict=True):
            counts = self._shards.is_first_replica
            if name in self._shards.whole:
                counts = self.world.is_first
            if counts:
                counted.append(p)
        square = torch.zeros((), dtype=torch.float64, device=self.world.device.torch)
        values = gradient_values(counted)
        if values:
            square += nn.utils.get_total_norm(values).double().square()
        self.grad_norm = self.world.all_reduce(square).sqrt()
        scale_to_norm(gradient_values(self.trained.values), self.grad_norm, clip_norm)

    def _gradients_are_finite(self) -> bool:
        """Tell whether the shards of the gradients are finite on all ranks."""
        is_unfit = float(not super()._gradients_are_finite())
        return not self.world.all_reduce(torch.tensor(is_unfit, device=self.world.exchange_device))

    def bytes_communicated(self) -> int:
        """This rank's shard, gathered in forward and in backward, and the whole gradients."""
        return 2 * self._shards.bytes_here + sum(p.nbytes for p in self.trained.held.values())

    def _refuse_gaps(self, here: list[bool]) -> None:
        raise InputError(
            f"fsdp: rank {here.index(False)} has no sample and a later rank has; "
            "give samples to the first ranks first, as lockstep.batches does"
        )

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, and keep what forward writes."""
        super()._check_sums(batch)
        self._watch.written = self.sums.written

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known, or is the shards."""
        _explain_shards(error)
        super()._explain(error, batch)

    def _add_gradient(self, total: torch.Tensor, divisor: Number) -> None:
        """Add the gradient of ``total / divisor``; other backwards are refused."""
        with during("backward"):
            super()._add_gradient(total, divisor)

    # ---- the whole model -------------------------------------------------------------------------

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that couldn't be cut, which every rank has whole."""
        return [(name, self._shards.mine[name]) for name in self._shards.whole]


def _explain_shards(error: Exception) -> None:
    """Raise an error that explains one of PyTorch's on shards.

    Raises:
        StrategyError: a model or a loss uses a parameter outside of the block's forward.
    """
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        raise StrategyError(
            "fsdp: a parameter of a block is used outside of the block's forward, where it is a "
            "shard",
            fix="name blocks that keep theirs to themselves: --blocks NAMES, or FSDP(blocks=...); "
            "or take ddp",
        ) from error
