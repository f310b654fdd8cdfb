"""``ddp=2xpp=2``: replicas in processes, each over the devices of its stages, as ``pp`` has them.

Each rank computes its local batch of every micro-batch by its own pipeline, and gradients, total
and count are summed over the ranks as ``ddp`` sums small ones: in one flat all-reduce after
backward. Micro-batches are cut from the global batch first, and local batches from these, so
``single`` with ``accumulate=m`` has the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lockstep.data import Batch
from lockstep.errors import StrategyError
from lockstep.job import Job
from lockstep.launch.device_table import drawn
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.pipelining.runner import Runner
from lockstep.pipelining.stage_layers import StagedModel
from lockstep.recipe import Recipe
from lockstep.strategies.pp import PP
from lockstep.strategies.product import Product
from lockstep.strategies.ranks.rank_step import RankStep, synchronised
from lockstep.strategies.staged_step import StagedStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.with_shares import WithShares


@dataclass(frozen=True)
class ReplicatedPP(Product, WithShares, PP):
    """Replicas in processes, each of stages of layers on several devices, micro-batches
    overlapped.
    """

    summary: ClassVar[str] = (
        "a process per replica, with a local batch; in it a stage of layers per device, as pp"
    )
    good_for: ClassVar[str] = "models too large for one device, and more devices than stages"

    @property
    def devices_per_rank(self) -> int:
        """Count the devices of a replica."""
        return self.sizes[1]

    def layout(self, devices: int) -> Layout:
        """Give each replica a local batch and a process, and each of its devices layers.

        Raises:
            StrategyError: the product is for another number of devices.
        """
        self.refuse_devices(devices)
        replicas, each = self.sizes
        axes = {"data": replicas, "stage": each}
        return Layout(axes, devices_per_process=each, shares=self._shares_of(replicas))

    def mesh(self, devices: Sequence[str]) -> list[str]:
        """Draw a line for each rank."""
        return drawn(self.layout(len(devices)), devices, self.chunks_on(self.sizes[1]))

    def seen_by_a_replica(self, job: Job) -> Job:
        """Give the job with batches of the largest local batch."""
        layout = self.layout(self.devices_needed)
        return job.replace(batch_size=max(layout.sizes(job.batch_size)))

    def planned(
        self, job: Job, world: World, before: Mapping[str, Any] | None = None
    ) -> ReplicatedPP:
        """Find the stages on rank 0, for all ranks.

        Raises:
            StrategyError: shares are to be measured.
        """
        if self._is_measured:
            raise StrategyError(
                f"{self.name}: shares auto isn't supported: give numbers, as --shares 2,1"
            )
        found: Any = self
        if world.is_first:
            found = PP.planned(self, job, world, before)
        with_stages: ReplicatedPP = world.broadcast_object(found)
        return with_stages

    def step_of(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        job: Recipe,
        world: World,
        staged: StagedModel,
        runner: Runner,
    ) -> Step:
        """Give the step of one replica."""
        exchange = synchronised(model, job, world)
        return ReplicaOfStages(model, optimizer, job, world, exchange, staged, runner)


class ReplicaOfStages(RankStep, StagedStep):
    """One rank's replica, on its devices."""

    def _add_parts(self, batch: Batch) -> Loss:
        # Batch norms are synchronised where there is one micro-batch.
        self._begin_exchange(batch.parts[0])
        return StagedStep.gradients(self, batch)
