"""``dp``: one process drives all devices; each has a replica of the model and a share of every
batch.

PyTorch's own DataParallel copies the model to every device at each step, gathers outputs on the
first device and leaves the loss there, and does nothing on CPU. Here replicas are kept, the loss
and backward run inside each replica's thread, and gradients are summed once, each thread adding a
part of the parameters::

    thread 0   forward  loss  backward  | adds parameters 0..k   |
    thread 1   forward  loss  backward  | adds parameters k..end |  one optimizer step
               (share 0, share 1)

On CPU slots all replicas share the storage of the parameters, with gradients of their own; on
accelerators they are refreshed once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.data.own_batches import parts_of
from lockstep.errors import StrategyError
from lockstep.launch.devices import Device
from lockstep.launch.layout import Layout
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.modes import draws_dropout
from lockstep.model.optimizers.build import build_optimizer
from lockstep.recipe import Recipe
from lockstep.strategies.replicas.copied_model import (
    refuse_other_parameters,
    refuse_uncopied,
)
from lockstep.strategies.replicas.replica_evaluator import ReplicaEvaluator
from lockstep.strategies.replicas.replicas import Replicas
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added
from lockstep.strategies.with_shares import WithShares
from lockstep.threads.replica_collectives import ThreadExchange
from lockstep.threads.sync_batchnorm import synchronise


@dataclass(frozen=True)
class DP(WithShares):
    """Replicas on threads of one process."""

    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = (
        "one process, a thread per device, each with the whole model and a local batch"
    )
    runs_functions: ClassVar[str] = "each replica's thread would call the function"
    good_for: ClassVar[str] = (
        "notebooks, and models of large operators; small layers wait for Python's interpreter lock"
    )

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch, all in one process."""
        return Layout({"data": devices}, devices, shares=self._shares_of(devices))

    def build(self, job: Recipe, world: World) -> Step:
        """Build the model on the first device and a replica on each other."""
        self.refuse_other_processes(world)
        model = build_model(job, world)
        if len(world.devices) > 1:
            refuse_uncopied(model, self.name)
        exchange = None
        if job.sync_batchnorm and len(world.devices) > 1:
            shares_device = len(set(world.devices)) < len(world.devices)
            if shares_device and not world.device.is_slot:
                raise StrategyError(
                    "sync_batchnorm needs a device for each replica: on one they would wait forever"
                )
            exchange = ThreadExchange(world.observers)
            synchronise(model, exchange)
        return DPStep(model, build_optimizer(job, model), job, world, exchange)


class DPStep(Step):
    """All replicas, their threads, and the one optimizer over the first replica's parameters.

    Attributes:
        copies: the replicas.
        home: the device that sums are moved to; None where all replicas are on the CPU.
    """

    timed = "replica"
    _evaluator_kind = ReplicaEvaluator

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: ThreadExchange | None,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self.copies = Replicas(model, world.devices, [exchange, self.whole_batch])
        self.home = None if self.copies.share_storage else world.device.torch
        self._exchange = exchange
        self._waits_in_backward = exchange is not None
        self._begin_streams(job.seed, world.step)
        if len(world.devices) > 1:
            self.loss.call_one_at_a_time()

    def gradients(self, batch: Batch) -> Loss:
        """Sum gradients of total / size over micro-batches and replicas."""
        loss = self._local_gradients(batch)
        self._reduce()
        return loss

    def _local_gradients(self, batch: Batch) -> Loss:
        """Leave the gradients of each replica in its parameters."""
        if self.is_checked:
            self.copies.refuse_changes()
        self._refresh()
        shares = self.scatter(batch)
        if self._exchange is not None:
            self._exchange.begin(*[min(part.of, len(shares)) for part in shares[0]])

        def compute(i: int) -> Loss:
            return self._on_replica(i, shares[i], batch.size)

        return added(self.copies.run(compute, range(len(shares))), self.home)

    @phase("communicating", "refresh replicas")
    def _refresh(self) -> None:
        """Make every replica equal to the first."""
        self.copies.follow(statistics=False)

    @phase("communicating", "scatter")
    def scatter(self, batch: Batch) -> list[list[Part]]:
        """Give each replica its share of each micro-batch, on its device."""
        devices = self.world.devices
        shares = batch.shares
        if shares is None:
            layout = self.world.layout
            cuts = [parts_of(part, layout.sizes(part.size)) for part in batch.parts]
            shares = [list(share) for share in zip(*cuts, strict=True)]
        placed = []
        for device, share in zip(devices, shares, strict=True):
            placed.append([self.placed(part, device) if part.size else part for part in share])
        return placed

    def placed(self, part: Part, device: Device | None = None) -> Part:
        """Give the part on a replica's device; None is that of the first replica."""
        return super().placed(part, device or self.world.device)

    @observed(lambda observer, step, number, *args: observer.replica(number))
    def _on_replica(self, i: int, parts: list[Part], size: int) -> Loss:
        """Compute forward, loss and backward of one replica's shares, in the replica's thread."""
        self.copies.all[i].clear_gradients()
        losses = []
        for j, part in enumerate(parts):
            if part.size:
                losses.append(self._of_part(i, j, part, size))
        return added(losses)

    def _of_part(self, i: int, j: int, part: Part, size: int) -> Loss:
        """Compute one replica's share of micro-batch ``j``."""
        replica = self.copies.all[i]
        numbers = self.draws.stream
        if j and numbers is not None:
            replica.seed(mixed(*numbers[:2], i, j))
        exchange = self._exchange
        if exchange is not None:
            exchange.enter(i, j)
        where = f"replica {i} ({self.world.devices[i]})"
        loss = self._forward_loss(replica.model, part, where)
        if i and self.is_checked:
            refuse_other_parameters(loss.total, self.model)
        made = self._backward(loss, size)
        if exchange is not None:
            exchange.leave(i, j)
        return made

    @phase("communicating", "reduce")
    def _reduce(self) -> None:
        """Sum the replicas' gradients into the first one's."""
        self.copies.add_gradients()

    # ---- random numbers --------------------------------------------------------------------------

    def seed(self, seed: int, number: int | None = None) -> None:
        """Begin a random stream for this step (or that number) on every replica."""
        super().seed(seed, number)
        self._begin_streams(seed, self.world.step if number is None else number)

    def _begin_streams(self, seed: int, number: int) -> None:
        for i, replica in enumerate(self.copies.all):
            replica.seed(mixed(seed, number, i))

    def _compile_models(self) -> None:
        """Compile each replica.

        Raises:
            StrategyError: the model draws random numbers, and what compiled code draws can't be
                told apart by thread.
        """
        if self._compile and self.copies.share_storage:
            draws = self.sums.draws or any(map(draws_dropout, self.model.modules()))
            if self.replicas > 1 and draws:
                raise StrategyError(
                    "dp: with compile and random numbers (dropout) results aren't reproducible, "
                    "since all threads draw from one generator in any order; take ddp, or leave "
                    "compile or dropout out"
                )
            self.copies.draw_from_shared_generator()
        super()._compile_models()

    # ---- what other parts of a step ask ----------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """Give every replica, the first one first."""
        return [replica.model for replica in self.copies.all]

    def _generators(self) -> list[torch.Generator]:
        """List the generators of the replicas on CPU devices."""
        found = [replica.generator for replica in self.copies.all]
        return [generator for generator in found if generator is not None]

    def share_buffers(self) -> None:
        """Give every replica the first one's mode and buffers, and parameters that may have changed."""
        self.copies.follow(statistics=True)
