"""``fsdp``: one process per device, each with a local batch and a shard of the model, its gradients
and its optimizer.

PyTorch's ``fully_shard`` gathers the parameters of a block when forward, and later backward, comes
to it, frees them afterwards, and sums gradients into the shards of the ranks. What is in no block
is gathered for all of forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lockstep.errors import StrategyError, counted
from lockstep.launch.device_table import drawn
from lockstep.launch.layout import Layout
from lockstep.launch.memory import free_memory
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.optimizers.build import build_optimizer
from lockstep.model.optimizers.kinds import has_own_state, is_of_pytorch
from lockstep.recipe import Recipe
from lockstep.run.events import Line
from lockstep.strategies.ddp import DDP, DDPStep
from lockstep.strategies.product import Product
from lockstep.strategies.ranks.rank_step import synchronised
from lockstep.strategies.replicas.copied_model import refuse_uncopied
from lockstep.strategies.steps.step import Step
from lockstep.strategies.with_shares import WithShares
from lockstep.tensors.byte_size import size

if TYPE_CHECKING:
    from lockstep.strategies.sharded.shards import Shards

_ELEMENTWISE = {
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "SparseAdam",
}
"""Optimizers of PyTorch that treat each element by itself, so that a shard is updated as the
whole would be.
"""


@dataclass(frozen=True)
class FSDP(WithShares):
    """Replicas in shards.

    Attributes:
        blocks: modules whose parameters are gathered on their own: ``"auto"`` for repeated layers,
            or names, with commas between, of modules or lists of modules.
        elementwise: confirm that an optimizer that is not PyTorch's treats each element of a
            parameter by itself.
    """

    blocks: str = "auto"
    elementwise: bool = False

    name: ClassVar[str] = "fsdp"
    summary: ClassVar[str] = (
        "a process per device, each with a shard of the model and a local batch"
    )
    good_for: ClassVar[str] = (
        "models whose weights, gradients and optimizer state don't fit on one device"
    )
    runs_functions: ClassVar[str] = (
        "an update of several losses would gather and free the shards several times"
    )

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch, a shard and a process."""
        return Layout({"shard": devices}, shares=self._shares_of(devices))

    def mesh(self, devices: Sequence[str]) -> list[str]:
        """Draw a line for each rank."""
        return drawn(self.layout(len(devices)), devices)

    def build(self, job: Recipe, world: World) -> Step:
        """Build the same model on every rank's CPU, and keep a shard of it on the rank's device.

        Raises:
            JobError, StrategyError: the model or the optimizer can't be built, or not sharded.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from lockstep.strategies.sharded.blocks import blocks_of
        from lockstep.strategies.sharded.recast_weights import recast_weights
        from lockstep.strategies.sharded.sharded_step import ShardedStep
        from lockstep.strategies.sharded.whole_parameters import ShardedLayout

        self.refuse_other_processes(world)
        # The whole may be too large for a device.
        model = build_model(job, world, place=world.size == 1)
        optimizer = build_optimizer(job, model, on=world.device.type)
        if world.size == 1:
            return DDPStep(model, optimizer, job, world, None, DDP())

        self._refuse_settings(job, world)
        refuse_uncopied(model, self.name)
        self._refuse_optimizer(optimizer)
        exchange = synchronised(model, job, world)
        whole = sum(p.nbytes for p in model.parameters())
        axes = world.layout.axes
        mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        blocks = blocks_of(model, self.blocks)
        if job.precision == "bf16":
            for block in blocks.values():
                recast_weights(block)
        shards = ShardedLayout(model, optimizer, mesh, blocks, world)
        if world.is_first:
            self._log_shards(shards, whole, world)
        elementwise = self._is_elementwise(optimizer)
        step = ShardedStep(model, optimizer, job, world, exchange, shards, elementwise)
        if 3 * whole > min(world.gather_objects(_free(world))):
            step.sums.last = 0
            text = f"a device has no room for all {size(whole)}: the sum check is left out"
            if world.is_first and job.check_every != 0:
                world.emit(Line.note(text))
        return step

    def _log_shards(self, shards: Shards, whole: int, world: World) -> None:
        """Log what a rank keeps of a model of ``whole`` bytes, and what is gathered together."""
        for name in shards.uncut:
            text = f'fsdp keeps "{name}" whole on each rank, since fully_shard can\'t cut it'
            world.emit(Line.note(text))
        text = (
            f"a rank keeps {size(shards.bytes_here)} of {size(whole)} of weights, gradients and "
            f"the optimizer's state likewise; gathered one at a time: "
            f"{counted(len(shards.blocks), 'block')}"
        )
        world.emit(Line(text, "plan"))

    def _is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(getattr(optimizer, "elementwise", self.elementwise))

    # ---- what can't be sharded -------------------------------------------------------------------

    def _refuse_settings(self, job: Recipe, world: World) -> None:
        if world.backend == "gloo" and world.device.type == "cuda":
            # Its functional collectives would end in a SIGSEGV.
            raise StrategyError(
                "fsdp: gloo can't gather shards that are on GPUs: take nccl, with a GPU for each "
                "rank"
            )
        if job.compile:
            raise StrategyError("fsdp: compile isn't supported: leave it out, or take ddp")
        if job.precision == "fp16":
            raise StrategyError(
                "fsdp: precision fp16 isn't supported, since its loss scale depends on all "
                "gradients: take bf16, or ddp"
            )

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from lockstep.strategies.sharded.shards import refuse_hooks

        name = type(optimizer).__name__
        known = is_of_pytorch(optimizer)
        if known and name not in _ELEMENTWISE:
            raise StrategyError(
                f"fsdp: {name} needs whole parameters, and a rank has a shard of each: take ddp, "
                "or an optimizer that treats each element by itself, as AdamW"
            )
        if has_own_state(optimizer):
            raise StrategyError(
                f"fsdp: {name} has a state_dict() of its own, which would return this rank's "
                "shards only: use ddp"
            )
        if self._is_elementwise(optimizer):
            return
        refuse_hooks(optimizer)
        if not known:
            raise StrategyError(
                f"fsdp: {name} would get a shard of each parameter, which is correct only for an "
                "optimizer that treats each element by itself: confirm it by --elementwise true "
                "(FSDP(elementwise=True)), or take ddp"
            )


def _free(world: World) -> float:
    """Return the bytes that a rank's device has free for the whole model and its gradients."""
    return math.inf if world.device.is_slot else free_memory(world.device)


@dataclass(frozen=True)
class ReplicatedFSDP(Product, FSDP):
    """Replicas, each in shards over several processes.

    Gradients are summed within a replica, then over replicas.
    """

    summary: ClassVar[str] = "a process per device, with a shard of its replica and a local batch"
    good_for: ClassVar[str] = "shards on the devices of a machine, replicas on several machines"

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch, a shard and a process.

        Raises:
            StrategyError: the product is for another number of devices.
        """
        self.refuse_devices(devices)
        replicas, each = self.sizes
        return Layout({"data": replicas, "shard": each}, shares=self._shares_of(devices))
