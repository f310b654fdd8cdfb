"""``hogwild``: ranks as processes on one set of weights in shared memory, without any waiting.

Each rank makes an update of its own from its share of each global batch::

    rank 0    share of batch 0 ──> update    share of batch 1 ──> update    share of batch 2 ──> update ...
                                     │ ▲                            │ ▲
    weights  ════════════════════════▼═│════════════════════════════▼═│═══════════════════════════════════
                                   ▲   │                          ▲   │
    rank 1    share of batch 0 ────┴───┘   share of batch 1 ──────┴───┘   (as fast as it can)

An update takes the mean gradient over the share, and the share's part of the learning rate. So the
N updates of a global batch together are the one that a single device makes, but for this: each rank
computes at the weights as it finds them, and where two write one weight at the same time, one of
the writes may be lost. That is rare and small where gradients are sparse (Niu et al., 2011,
https://arxiv.org/abs/1106.5730), and there is no sum to wait for.

**The weights are shared; the optimizer's state is not**: each rank has its own, as in PyTorch's own
example. A step counter or a moment that several ranks read, decay and write would be torn, and
would decay N times as often as on one device. A rank's own counts global batches, at the pace of
one device's: Adam's counter and its moments mean what they mean there, and momentum that no other
rank moves adds nothing to what waiting for nobody adds by itself (Mitliagkas et al., 2016,
https://arxiv.org/abs/1605.09774). The price: N states in memory, as under ``ddp``, each of them an
estimate from 1 / N of the samples. The first rank's is saved.

Ranks meet at the end of an epoch only, for evaluating and saving weights that nobody writes
meanwhile. (A stream, and a loop of one's own that gives a step inputs rather than batches of
``lockstep.batches``, make them meet at each step.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lockstep.data import Batch
from lockstep.errors import RunError, StrategyError
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import buffers_of, build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.optimizers.build import build_optimizer
from lockstep.model.optimizers.kinds import has_own_state, with_modes
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.buffer_broadcast import take_first
from lockstep.strategies.shared_weights import SharedWeights
from lockstep.strategies.single import SingleStep
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, added
from lockstep.strategies.strategy import Strategy


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Shared weights, no synchronisation."""

    name: ClassVar[str] = "hogwild"
    runs_functions: ClassVar[str] = (
        "ranks don't wait for one another, so each would read half-updated parameters of other "
        "parts"
    )
    summary: ClassVar[str] = (
        "a process per CPU device, all updating the same weights in shared memory without waiting"
    )
    good_for: ClassVar[str] = (
        "large embeddings with sparse gradients, on CPU; results differ from single-device training"
    )
    exact: ClassVar[Literal[True] | str] = (
        "hogwild is not exact: ranks write the same weights without waiting for one another, so "
        "that no two runs end with the same results; ddp keeps the results of one device"
    )

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch and a process; nobody waits."""
        return Layout({"data": devices}, together=False)

    def build(self, job: Recipe, world: World) -> Step:
        """Build the same model on every rank, and move its weights to shared memory.

        Raises:
            StrategyError: the weights can't be shared, or a setting would make the ranks wait for
                one another.
        """
        self.refuse_other_processes(world)
        _refuse_settings(job, world)
        model = build_model(job, world)
        optimizer: torch.optim.Optimizer
        if world.size == 1:
            optimizer = build_optimizer(job, model)
            return HogwildStep(model, optimizer, job, world, None)

        shared = SharedWeights(model, world)
        optimizer = build_optimizer(job, model)
        _refuse_optimizer(optimizer)
        return HogwildStep(model, optimizer, job, world, shared)


def _refuse_settings(job: Recipe, world: World) -> None:
    if not world.device.is_slot:
        raise StrategyError(
            f"hogwild shares weights in the memory of the CPU, and this is {world.device}: "
            "take ddp, or 2xcpu"
        )
    if world.size > world.local_size:
        raise StrategyError(
            "hogwild shares the memory of one machine, and these ranks are on several: take ddp"
        )
    if job.sync_batchnorm and world.size > 1:
        raise StrategyError(
            "sync_batchnorm makes ranks wait for one another, hogwild doesn't: choose one of them"
        )
    if job.precision == "fp16":
        raise StrategyError(
            "hogwild: precision fp16 isn't supported, since each rank would "
            "scale the loss differently: take bf16"
        )


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that ranks can't share the learning rate or the weights of.

    Raises:
        StrategyError: a smaller learning rate doesn't make its steps smaller, it has ``train()``
            and ``eval()``, or a state of its own.
    """
    reason = ""
    if isinstance(optimizer, (torch.optim.Rprop, torch.optim.Adafactor)):
        reason = "makes steps that don't follow it, so that each rank would make a whole step"
    elif with_modes(optimizer):
        reason = "has train() and eval(), by which each rank would write the weights of all"
    elif has_own_state(optimizer):
        reason = "has a state_dict() of its own, and may keep other learning rates"
    elif optimizer.defaults.get("lr") is None:
        reason = "has none"
    if reason:
        raise StrategyError(
            f"hogwild gives each rank its part of the learning rate, and "
            f"{type(optimizer).__name__} {reason}: take another optimizer, or ddp"
        )


class HogwildEvaluator(Evaluator):
    """Evaluates weights that nobody writes meanwhile."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in this context; nobody writes weights before all ranks have done."""
        with super().evaluating():
            yield
        self._step.world.barrier()


class HogwildStep(SingleStep):
    """One rank: its own model object and optimizer, on weights that are everybody's."""

    _evaluator_kind = HogwildEvaluator

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        shared: SharedWeights | None,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._shared = shared
        self.accumulation.why_whole = (
            "hogwild: a rank takes its part of the learning rate by the size of the global batch, "
            "which isn't known before step.update(): call step(inputs, targets), with accumulate= "
            "of lockstep.parallelize, or take ddp"
        )

    def update(self, batch: Batch | None = None) -> Result:
        """Make one update from this rank's share; total and count are those of the share."""
        if batch is None or self._shared is None:
            return super().update(batch)
        # The other ranks needn't have heard of it yet.
        self.stopping = self.world.asked_to_stop()
        share = sum(part.size for part in batch.parts)
        if not share:
            self.world.step += 1
            return Result(0.0, 0, batch.size)
        with self._part_of_rate(share / batch.size):
            result = super().update(dataclasses.replace(batch, size=share))
        result.size = batch.size
        return result

    @contextmanager
    def _part_of_rate(self, part: float) -> Iterator[None]:
        """Multiply the learning rates by ``part`` in this context.

        Gradients aren't multiplied: Adam would take no notice of that, and weight decay would come
        N times.
        """
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate * part
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def over_ranks(self, loss: Loss) -> Loss:
        """Sum over all ranks, at the end of each rank's epoch."""
        return added(self.world.gather_objects(loss))

    # ---- where all ranks meet --------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Wait until nobody updates any more, and give every rank rank 0's buffers.

        Raises:
            RunError: a weight is no longer shared.
        """
        if self._shared is None:
            return
        self._shared.check()
        first, *others = self.world.gather_objects(self.trained.names)  # which waits for all ranks
        if any(other != first for other in others):
            raise RunError(
                "hogwild: parameters are frozen on some ranks only: change the model on every rank "
                "alike (on_event runs on rank 0 only, callbacks on all)"
            )
        take_first(self.world, buffers_of(self.model))

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the state with copies of the weights, before other ranks write them."""
        state = super().state_dict(whole=whole)
        if self._shared is None:
            return state
        if self.world.is_first:
            weights = dict(state["model"])
            for name, value in weights.items():
                if isinstance(value, torch.Tensor):
                    weights[name] = value.clone()
            state["model"] = weights
        self.world.barrier()  # only now may others go on
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state: all ranks write the same weights, and have the same optimizer state."""
        super().load_state_dict(state)
        self.world.barrier()
