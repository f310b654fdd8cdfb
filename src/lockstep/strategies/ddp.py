"""``ddp``: a process per device, each with the whole model and a share of every batch.

Gradients that are large are summed by PyTorch's ``DistributedDataParallel`` while
backward still runs. Small ones go in one flat all-reduce after it, which is faster: the time of a
small sum is nearly all waking up.

Ranks with an empty share call neither model nor loss. Every rank knows the size of the global
batch, so all know when that happens, and such a step is summed flat (PyTorch's reducer would wait
for the missing backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.optimizers.build import build_optimizer
from lockstep.model.optimizers.fused import sparse_parameters
from lockstep.model.optimizers.kinds import is_of_pytorch
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.rank_step import RankStep, synchronised
from lockstep.strategies.ranks.reducers import OverlappedReducer, explain_reducer
from lockstep.strategies.step_function.function_step import FunctionStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added
from lockstep.strategies.with_shares import WithShares
from lockstep.threads.replica_collectives import RankExchange

_SMALL_GRADIENTS = 2 << 20
"""Bytes of gradients up to which ``reduce="auto"`` sums them flat (see benchmarks/)."""


@dataclass(frozen=True)
class DDP(WithShares):
    """Replicas in processes.

    Attributes:
        reduce: ``"flat"``: one all-reduce after backward; ``"overlapped"``: PyTorch's
            DistributedDataParallel, buckets while backward runs; ``"auto"`` is flat for small
            gradients, else overlapped.
        bucket_mb: the size of an overlapped bucket, in MiB.
    """

    reduce: Literal["auto", "flat", "overlapped"] = "auto"
    bucket_mb: float = 25.0

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "a process per device, each with the whole model and a local batch"
    runs_functions: ClassVar[Literal[True]] = True
    good_for: ClassVar[str] = (
        "most models that fit on one device; the fastest exact strategy on several"
    )

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch and a process."""
        return Layout({"data": devices}, shares=self._shares_of(devices))

    def build(self, job: Recipe, world: World) -> Step:
        """Build the same model on every rank."""
        self.refuse_other_processes(world)
        model = build_model(job, world)
        exchange = synchronised(model, job, world)
        optimizer = build_optimizer(job, model)
        kind = DDPStep if job.step is None else DDPFunctionStep
        return kind(model, optimizer, job, world, exchange, self)


class DDPStep(RankStep):
    """One rank's replica."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: RankExchange | None,
        strategy: DDP,
    ) -> None:
        super().__init__(model, optimizer, job, world, exchange)
        self._flat = self.reducer
        self._overlapped: OverlappedReducer | None = None
        if job.step is None and world.size > 1 and self._overlaps(strategy.reduce):
            self._overlapped = OverlappedReducer(
                model, world, self._forward_loss, strategy.bucket_mb
            )
            self._waits_in_backward = True

    def _overlaps(self, reduce: str) -> bool:
        """Return whether gradients are summed while backward runs.

        PyTorch's reducer can't sum sparse gradients that a rank doesn't have.
        """
        if sparse_parameters(self.model):
            return False
        if reduce == "auto":
            return self._bytes() > _SMALL_GRADIENTS
        return reduce == "overlapped"

    def _add_parts(self, batch: Batch) -> Loss:
        for p in self.trained.values:
            p.grad = None
        overlapped = self._begin_overlapped(batch)
        self.reducer = overlapped or self._flat
        losses: list[Loss] = []
        for number, part in enumerate(batch.parts):
            self._begin_exchange(part)
            if part.size:
                self.draws.begin_part(number)
                is_last = number == len(batch.parts) - 1
                losses.append(self._add_part(part, batch.size, overlapped, is_last=is_last))
        return added(losses)

    def _begin_overlapped(self, batch: Batch) -> OverlappedReducer | None:
        """Give PyTorch's reducer, where this update is summed while backward runs."""
        if self._overlapped is None or not torch.is_grad_enabled():
            return None
        if any(part.of < self.world.size for part in batch.parts):
            self._overlapped.drop()
            return None
        is_seen = self.own_loop or self.has_own_callbacks
        self._overlapped.begin(keeps_gradients=is_seen or not is_of_pytorch(self.optimizer))
        return self._overlapped

    def _add_part(
        self, part: Part, size: int, overlapped: OverlappedReducer | None, *, is_last: bool
    ) -> Loss:
        """Add the gradient of a part of a batch, and give the part's loss."""
        part = self.placed(part)
        self._reduces = overlapped is not None and is_last
        if overlapped is None:
            return self._backward(self._forward_loss(self.model, part), size)
        with overlapped.part(is_last=is_last):
            return self._backward(overlapped.forward(part, is_last=is_last), size)

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, outside of PyTorch's reducer."""
        if self._overlapped is not None and self.sums.is_due(self._updates):
            self._overlapped.drop()
        super()._check_sums(batch)

    def _follow_flags(self, name: str) -> None:
        super()._follow_flags(name)
        if self._overlapped is not None:
            self._overlapped.drop()

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known, or is the reducer."""
        explain_reducer(error)
        super()._explain(error, batch)

    def _bytes(self) -> int:
        return sum(p.nbytes for p in self.trained.values)


class DDPFunctionStep(FunctionStep, DDPStep):
    """A person's function of several updates, on one rank; each of them sums gradients flat."""

    def gradients(self, batch: Batch) -> Loss:
        """Make the updates of the function; buffers follow rank 0's."""
        self._buffers.follow()
        loss = super().gradients(batch)
        if self.is_checked:
            self._buffers.look()
        return loss
