"""ShardedStep: one rank's local batch, and its shard of the model, its gradients and its
optimizer's state.

All ranks have to come to the same blocks in the same order, since each gathers the block's
parameters there. So a rank whose local batch is empty computes the first rank's sample, times zero;
and in updates 1, 2, 4, 8, ... ranks compare to which block they come. Gradients of every
micro-batch are summed at once, so no rank holds more than one block's whole gradients, unless the
strategy says otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data import Batch, Part
from lockstep.data.own_batches import batch_of
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, StrategyError
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizer import (
    gradient_values,
    scale_to_norm,
    sparse_parameters,
)
from lockstep.recipe import Recipe
from lockstep.strategies.ddp import DDP, DDPStep
from lockstep.strategies.rank_tensors import FlatGradients
from lockstep.strategies.sharded.block_watch import BlockWatch
from lockstep.strategies.sharded.loss_reads import LossReads, explain_shards, refuse_other_shards
from lockstep.strategies.sharded.optimizer_of_shards import refuse_hooks
from lockstep.strategies.sharded.sharded_layout import ShardedLayout
from lockstep.strategies.sharded.shards import Shards
from lockstep.strategies.sharded.whole_parameters import OF_OWN_LOOP
from lockstep.strategies.sharded.without_a_trace import without_a_trace
from lockstep.strategies.steps.update_result import Result, added, as_tensor
from lockstep.tensors.pytree import to_device
from lockstep.threads.replica_collectives import RankExchange

T = TypeVar("T")


class ShardedStep(DDPStep):
    """One rank's local batch, and its shard of the model."""

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
        self._mine = {name: shards.local.get(name, p) for name, p in model.named_parameters()}
        super().__init__(model, optimizer, job, world, exchange, DDP(reduce="flat"))
        held = set(self._optimized)
        self._held = {
            name: p for name, p in model.named_parameters() if id(self._mine[name]) in held
        }
        self._frozen = {name: p for name, p in self._frozen.items() if name not in self._held}
        self._find_trained()
        self._waits_in_backward = True
        self._elementwise = elementwise
        self._evaluates, self._evaluations = (
            False,
            0,
        )  # batches of evaluations, of which every rank computes something
        self._watch, self._reads = (
            BlockWatch(model, shards, world, self._compares_blocks),
            LossReads(shards.cut),
        )
        self.loss.within = self._in_loss
        self.layout: ShardedLayout = ShardedLayout(model, optimizer, shards, self._mine, world)

    def _find_trained(self) -> None:
        for name, local in self._shards.local.items():
            local.requires_grad_(self._shards.cut[name].requires_grad)
        super()._find_trained()
        self._parameters = [self._mine[name] for name in self._names]
        self._whole = [
            p
            for name, p in zip(self._names, self._parameters, strict=True)
            if name in self._shards.whole
        ]

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
        """Gradients of total / size, summed over micro-batches and ranks; of what was cut, this
        rank's part.
        """
        for p in (*self._parameters, *self._shards.cut.values()):
            p.grad = None
        self._watch.begin_update()
        self._buffers.follow()
        losses: list[Loss] = []
        parts = [
            part for part in batch.parts if part.of
        ]  # (in a loop of one's own no rank may have a sample of one)
        for number, part in enumerate(parts):
            if not self.sync_each_microbatch:
                with self._shards.fsdp_module() as model:
                    model.set_requires_gradient_sync(number == len(parts) - 1)
            if self._exchange is not None:
                self._exchange.begin(min(part.of, self.world.size))
            self._begin_part(number)
            part, is_stand_in = self._or_first_sample(part)
            if is_stand_in:
                self._compute_in_vain(part)
                continue
            part = self.placed(part)
            loss = self._forward_loss(self.model, part)
            losses.append(loss.detached())
            self._add_gradient(loss.total, self._divisor(loss.count, batch.size))
        loss = self._summed_shards(added(losses))
        self._end_parts(batch)
        return loss

    def _or_first_sample(self, part: Part) -> tuple[Part, bool]:
        """The part, or where this rank has no sample of it, the first rank's, and True; every
        rank calls this.
        """
        if part.of >= self.world.size:
            return part, False
        first = part.inputs, part.targets
        if (
            self._on_accelerator and self.world.is_first
        ):  # else the others would unpack it on this rank's device
            first = to_device(first, torch.device("cpu"))
        inputs, targets, size = self.world.broadcast_object((*first, part.size))
        return (part, False) if part.size else (Part(inputs, targets, size, part.of), True)

    def _compute_in_vain(self, part: Part) -> None:
        """Forward and backward of another rank's sample, times zero, so that this rank comes to
        each collective.
        """
        part = self.placed(part)
        with self._standing_in():
            with self._precision.autocast():
                loss = self.loss(self.forward(self.model, part), part.targets, part.size)
            self._add_gradient(loss.total, 0)

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """In which a sample is computed in vain."""
        dtype = next((p.dtype for p in self._mine.values() if p.is_floating_point()), None)
        with (
            self._watch.during("stand-in"),
            without_a_trace(self.model, dtype, self.world.device.torch),
        ):
            yield

    @phase("communicating", "reduce")
    def _summed_shards(self, loss: Loss) -> Loss:
        """Take the gradients that were summed, and sum what is beside them. What no rank used
        has none.
        """
        cut = [name for name in self._names if name in self._shards.cut]
        beside, order = as_tensor(self._beside(loss), self.world.device.torch), self._watch.order
        flags = torch.tensor(
            [*(name in self._watch.used for name in cut), order, order**2], dtype=torch.float64
        )
        flags = flags.to(self.world.exchange_device)
        if self._on_accelerator:  # whose values the host doesn't wait for
            self.world.all_reduce(flags)
            sums = self.world.all_reduce(beside)
        else:
            both = self.world.all_reduce(torch.cat([beside, flags]))
            sums, flags = both[: len(beside)], both[len(beside) :]
        *uses, orders, squares = flags.tolist()
        self._watch.refuse_other_orders(orders, squares)
        for name, ranks in zip(cut, uses, strict=True):
            grad = self._shards.cut[name].grad
            if ranks and not isinstance(grad, DTensor):
                raise StrategyError(
                    f'fsdp: the gradient of "{name}" was not summed over the ranks: take ddp'
                )
            self._mine[name].grad = grad.to_local() if ranks and isinstance(grad, DTensor) else None
            if not ranks:
                self._shards.cut[name].grad = None
        if self._whole:  # summed as ``ddp`` does
            if self._flat is None:
                self._flat = FlatGradients(self._whole, 1, sparse_parameters(self.model))
            self._flat.sum_over(self.world, [0.0])
        return self._taken(sums if self._on_accelerator else sums.tolist())

    def backward(self, inputs: Any, targets: Any = None) -> Result:
        """As every step's; the model has the gradients of all parts so far, too."""
        result = super().backward(inputs, targets)
        self._shards.show_gradients()
        return result

    def _are_thrown_away(self) -> bool:
        self._shards.take_gradients()
        has = any(was is not None and was.numel() for was, _ in self._left)
        votes = over_ranks(self.world, has, super()._are_thrown_away())
        return any(has for has, _ in votes) and all(yes or not has for has, yes in votes)

    def _given_parts(self) -> tuple[Batch, Loss]:
        if self._losses:
            self._shards.take_gradients()
        return super()._given_parts()

    @phase("computing", "clip")
    def _clip(self, clip_norm: float) -> None:
        """Keep the norm of all gradients together at ``clip_norm`` or less: the square of the norm
        is summed over the ranks.
        """
        whole, is_first_replica = {id(p) for p in self._whole}, self._shards.is_first_replica
        counted = [
            p
            for p in self._parameters
            if (self.world.is_first if id(p) in whole else is_first_replica)
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.world.device.torch)
        if values := gradient_values(counted):
            square += nn.utils.get_total_norm(values).double().square()
        self.grad_norm = norm = self.world.all_reduce(square).sqrt()
        scale_to_norm(gradient_values(self._parameters), norm, clip_norm)

    def _gradients_are_finite(self) -> bool:
        """Tell whether the shards of the gradients are finite on all ranks."""
        unfit = torch.tensor(
            float(not super()._gradients_are_finite()), device=self.world.exchange_device
        )
        return not self.world.all_reduce(unfit)

    def bytes_communicated(self) -> int:
        """Its shard, which the others gather in forward and again in backward, and the whole
        gradients.
        """
        return 2 * self._shards.bytes_here + sum(p.nbytes for p in self._held.values())

    def _refuse_gaps(self, here: list[bool]) -> None:
        raise InputError(
            f"fsdp: rank {here.index(False)} has no sample and a later rank has; "
            "give samples to the first ranks first, as lockstep.batches does"
        )

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known, or is the shards."""
        explain_shards(error)
        super()._explain(error, batch)

    def _add_gradient(self, total: torch.Tensor, divisor: Number) -> None:
        """As every step's; other backwards are refused."""
        with self._watch.during("backward"):
            super()._add_gradient(total, divisor)

    def _compares_blocks(self) -> bool:
        return is_power_of_two(self._evaluations) if self._evaluates else self.is_checked

    # ---- evaluation ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """As every evaluator's; what is in no block is freed afterwards, for which training
        waits until backward.
        """
        before, self._evaluates = self._evaluates, True
        with super().evaluating():
            try:
                yield
            finally:
                self._evaluates = before
                if not self.layout.are_gathered:
                    self._shards.reshard()

    def _of_each(
        self, function: Callable[[nn.Module, Part], T], batch: Batch
    ) -> list[tuple[Part, T]]:
        self._evaluations += 1
        part, is_stand_in = self._or_first_sample(batch.parts[0])
        try:
            if not is_stand_in:
                return super()._of_each(function, batch)
            with self._standing_in():
                self._predicted(self.model, self.placed(part))
        except RuntimeError as error:
            explain_shards(error)
            raise
        return []

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """As every evaluator's; every rank calls it."""
        inputs, targets = inputs if isinstance(inputs, Batch) else (inputs, targets)
        with self.evaluating():
            batch = batch_of(inputs, targets, 1, self.world, self._refuse_gaps)
            if batch.parts[0].of:
                for _, (outputs, (total, count)) in self._of_each(self.judged, batch):
                    return outputs, total, count
            return None, 0.0, 0

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, and keep what forward writes."""
        super()._check_sums(batch)
        self._watch.written = self.sums.written

    # ---- the whole model -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_loss(self) -> Iterator[None]:
        with self._watch.during("loss"), self._reads:
            yield

    def _begin_update(self, batch: Batch) -> None:
        """Refuse shards that were replaced, then begin as every step does."""
        self._shards.refuse_assigned()
        self._shards.drop_hooks()
        refuse_other_shards(self.loss, self._shards.cut)
        super()._begin_update(batch)

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """As that of ``ddp``: those that couldn't be cut."""
        return [(name, p) for name, p in self._mine.items() if name in self._shards.whole]

    of_own_loop = (OF_OWN_LOOP,)
