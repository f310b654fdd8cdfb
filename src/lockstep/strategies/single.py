"""``single``: one device, the reference that all other strategies are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.data import Batch
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.loss import Loss
from lockstep.model.optimizers.build import build_optimizer
from lockstep.recipe import Recipe
from lockstep.strategies.step_function.function_step import FunctionStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added
from lockstep.strategies.strategy import Strategy


@dataclass(frozen=True)
class Single(Strategy):
    """The whole model on one device."""

    name: ClassVar[str] = "single"
    summary: ClassVar[str] = "one device, with the whole model and the whole batch"
    runs_functions: ClassVar[Literal[True]] = True
    good_for: ClassVar[str] = "the reference; models that one device trains fast enough"

    def layout(self, devices: int) -> Layout:
        """Lay out one device."""
        return Layout({"data": 1})

    def build(self, job: Recipe, world: World) -> Step:
        """Build the model and its optimizer on the world's one device.

        Raises:
            StrategyError: this is one of several processes.
        """
        self.refuse_other_processes(world)
        model = build_model(job, world)
        kind = SingleStep if job.step is None else SingleFunctionStep
        return kind(model, build_optimizer(job, model), job, world)


class SingleStep(Step):
    """The step of one device: forward and backward of each micro-batch in turn."""

    def gradients(self, batch: Batch) -> Loss:
        """Compute gradients, which autograd sums over the micro-batches."""
        for p in self.trained.values:
            p.grad = None

        losses: list[Loss] = []
        for number, part in enumerate(batch.parts):
            if not part.size:
                continue
            self.draws.begin_part(number)
            loss = self._forward_loss(self.model, self.placed(part))
            losses.append(self._backward(loss, batch.size))
        return added(losses)


class SingleFunctionStep(FunctionStep, SingleStep):
    """The step of a person's function that makes several updates."""
