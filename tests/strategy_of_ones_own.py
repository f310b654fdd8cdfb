"""A strategy that is new: this file, and one line in the list of strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.data import Batch
from lockstep.job import Job
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.optimizers.build import build_optimizer
from lockstep.strategies.single import SingleStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.strategy import Strategy


@dataclass(frozen=True)
class EveryOther(Strategy):
    """One device that updates in some steps only.

    Attributes:
        every: it updates in each step whose number is a multiple of it.
    """

    name: ClassVar[str] = "every_other"
    summary: ClassVar[str] = "one device, which updates on even steps only"
    good_for: ClassVar[str] = "showing what a strategy consists of"
    exact: ClassVar[Literal[True] | str] = (
        "every_other updates on even steps only, so results differ"
    )

    every: int = 2

    def layout(self, devices: int) -> Layout:
        """One device."""
        return Layout({"data": 1})

    def build(self, job: Job, world: World) -> Step:
        """Build the model and its optimizer."""
        model = build_model(job, world)
        step = EveryOtherStep(model, build_optimizer(job, model), job, world)
        step.every = self.every
        return step


class EveryOtherStep(SingleStep):
    """As ``single``, without gradients in the steps between."""

    every = 2

    def gradients(self, batch: Batch) -> Loss:
        """Those of ``single``, or none."""
        loss = super().gradients(batch)
        if self.world.step % self.every:
            for p in self.model.parameters():
                p.grad = None
        return loss
