"""RankStep: what the steps of several ranks have in common, as those of ``ddp`` and ``fsdp``.

A rank sums its gradients with the others by a reducer, with total and count beside them. Buffers
follow rank 0's, and parameters that every rank has whole must stay the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.errors import InputError, RunError, StrategyError
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.build import buffers_of, differing_tensors
from lockstep.model.losses.loss import Loss
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.buffer_broadcast import FollowedBuffers, take_first
from lockstep.strategies.ranks.reducers import FlatReducer, Reducer
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import nested
from lockstep.threads.replica_collectives import RankExchange
from lockstep.threads.sync_batchnorm import synchronise


class RankStep(Step):
    """One of several ranks, each with a local batch.

    Args:
        model: this rank's replica, or what it has of the model.
        optimizer: of the parameters that this rank has.
        job: how an update is computed.
        world: the ranks.
        exchange: between the batch norms of the ranks; None where they aren't synchronised.
        stages: of the model, where it has several.

    Attributes:
        reducer: sums gradients over the ranks.
    """

    reducer: Reducer

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: RankExchange | None,
        *stages: Any,
    ) -> None:
        super().__init__(model, optimizer, job, world, *stages)
        self._exchange = exchange
        self._needs_first_ranks = "sync_batchnorm" if exchange is not None else ""
        self._waits_in_backward = exchange is not None
        self._buffers = FollowedBuffers(model, world)
        self.reducer = FlatReducer(model, world)

    def gradients(self, batch: Batch) -> Loss:
        """Sum gradients of total / size over micro-batches and ranks."""
        loss = self._local_gradients(batch)
        if self.world.size > 1:
            loss = self._sum_over_ranks(loss)
        self._end_parts(batch)
        return loss

    def _local_gradients(self, batch: Batch) -> Loss:
        """Leave the gradients of this rank's local batches, computed with rank 0's buffers."""
        self._buffers.follow()
        return self._add_parts(batch)

    def _add_parts(self, batch: Batch) -> Loss:
        """Leave the gradients of this rank's local batches, and return the sum of their losses."""
        raise NotImplementedError

    def _begin_exchange(self, part: Part) -> None:
        """Let the batch norms of the ranks that have samples of a micro-batch exchange theirs."""
        if self._exchange is not None:
            parties = min(part.of, self.world.size)
            self._exchange.begin(parties)

    @phase("communicating", "reduce")
    def _sum_over_ranks(self, loss: Loss) -> Loss:
        """Sum gradients, total, count and parts, and how many ranks were asked to stop."""
        names = self.part_names.of(loss)
        stops = self.world.asked_to_stop()
        numbers = [stops, *loss]
        for name in names:
            numbers += loss.parts.get(name, (0.0, 0))

        asked, *sums = self.reducer.sum(self.trained.values, numbers)
        self.checks.agree_to_stop(asked)
        return nested(iter(sums), names)

    def _end_parts(self, batch: Batch) -> None:
        """Give a rank that had no sample what forward wrote on the others; look for more."""
        for part in batch.parts:
            if 0 < part.of < self.world.size:
                self.share_buffers()
                return
        if self.is_checked:
            self._buffers.look()

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        if self.world.size == 1:
            return
        self._buffers.look()
        take_first(self.world, buffers_of(self.model))

    def replicated(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Give the parameters that every rank has whole."""
        return self.model.named_parameters()

    def after_events(self) -> None:
        """Make sure that all ranks have the same parameters.

        Raises:
            RunError: a parameter differs, since something but the optimizer wrote it.
        """
        if self.world.size == 1:
            return
        drifted = differing_tensors(self.replicated(), self.world)
        if drifted is not None:
            raise RunError(
                f'parameter "{drifted}" is no longer the same on all ranks: something other than '
                "the optimizer wrote it",
                kind="drift",
                fix="don't write it in forward, in on_event, which runs on rank 0 only, or in a "
                "callback on some ranks only; don't convert or move the model (model.half(), "
                "model.cpu()), but a copy; an optimizer must not draw random numbers",
            )

    def _follow_flags(self, name: str) -> None:
        if self.world.size > 1:
            is_trained = self.trained.held[name].requires_grad
            what = "trained" if is_trained else "frozen"
            self.world.meet(f'a change of the model (parameter "{name}" is {what} now)')
        super()._follow_flags(name)

    def _refuse_gaps(self, here: list[bool]) -> None:
        """Refuse a rank without samples before one with some, where the first ranks must have some.

        The groups of ranks that exchange statistics are those of the first ranks, and in shards a
        rank without samples computes the first rank's.

        Args:
            here: whether each rank has a sample.

        Raises:
            InputError: the first ranks must have some.
        """
        if self._needs_first_ranks:
            empty = here.index(False)
            raise InputError(
                f"{self._needs_first_ranks}: rank {empty} has no sample and a later rank has; "
                "give samples to the first ranks first, as lockstep.batches does"
            )


def synchronised(model: nn.Module, job: Recipe, world: World) -> RankExchange | None:
    """Let batch norms normalise over all ranks, where the job asks for that.

    Args:
        model: this rank's; its batch norms exchange their statistics from now on.
        job: asks for it by ``sync_batchnorm``.
        world: the ranks.

    Returns:
        What the batch norms exchange their statistics through.

    Raises:
        StrategyError: the model has PyTorch's ``SyncBatchNorm``, and the job doesn't ask for it.
    """
    if world.size == 1:
        return None
    if job.sync_batchnorm:
        exchange = RankExchange(world)
        synchronise(model, exchange)
        return exchange

    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StrategyError(
                f'"{name}" is a SyncBatchNorm of PyTorch\'s, whose ranks would wait for one that '
                "has no sample",
                fix="take sync_batchnorm=True, which normalizes over all replicas",
            )
    return None
