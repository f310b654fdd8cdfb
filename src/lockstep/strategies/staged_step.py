"""StagedStep: micro-batches go through one model with layers on several devices, for ``pp`` and
``mp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.data import Batch, mixed
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device
from lockstep.launch.observer import observed
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.pipelining.runner import Runner, Work
from lockstep.pipelining.stage_layers import StagedModel
from lockstep.recipe import Recipe
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added
from lockstep.threads.random_streams import Streams, stream

T = TypeVar("T")

_FEW = 2**23
"""Parameters up to which one thread updates sooner than several that have to be woken: an
estimate.
"""


class StagedEvaluator(Evaluator):
    """Evaluates a model over several devices; what meets on different devices is moved."""

    _step: StagedStep

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate whole batches in this thread, with as many cores as one stage has.

        Cut they might give other numbers, and overlapped mix what a model keeps in attributes.
        """
        step = self._step
        with super().evaluating(), step.staged.moving(), occupied(step.world.device):
            yield


class StagedStep(Step):
    """One model over several devices, and the one optimizer over its parameters.

    Args:
        model: the model.
        optimizer: of its parameters.
        job: its ``accumulate`` is the number of micro-batches.
        world: of this process.
        staged: see below.
        runner: see below.

    Attributes:
        staged: the model, with its layers on several devices.
        runner: computes the micro-batches.
    """

    _evaluator_kind = StagedEvaluator

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        staged: StagedModel,
        runner: Runner,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self.staged = staged
        self.runner = runner
        if self.whole_batch is not None:
            self.whole_batch.runner = runner
            runner.on_abort.append(self.whole_batch.abort)
        self._is_small = False
        # On accelerators a device's time is not its thread's, which only queues work.
        self.timed = "rank"
        if world.device.is_slot:
            self.timed = "device"
            elements = sum(p.numel() for p in self.trained.values)
            self._is_small = elements <= _FEW

    def gradients(self, batch: Batch) -> Loss:
        """Sum gradients over the micro-batches, by autograd itself."""
        for p in self.trained.values:
            p.grad = None
        streams = Streams()
        parts = [(number, part) for number, part in enumerate(batch.parts) if part.size]
        if not parts:
            # Other replicas have all samples.
            return added([])

        def begin(i: int) -> None:
            number, _ = parts[i]
            self.draws.begin_part(number)

        def forward(i: int) -> Loss:
            number, part = parts[i]
            with self._drawing(number, streams), self.staged.moving():
                return self._forward_loss(self.model, self.placed(part))

        def backward(i: int, made: Loss) -> Loss:
            return self._backward(made, batch.size)

        work = Work(begin, forward, backward, len(parts))
        if not torch.is_grad_enabled():
            losses = []
            for i in range(len(parts)):
                begin(i)
                losses.append(forward(i))
            return added(losses)
        found = self._stages(work)
        home = None
        if self.staged.moves:
            # Targets, and so counts, are not where the loss is.
            home = self.world.device.torch
        return added(found, home)

    @observed(lambda observer, *args: observer.stages())
    def _stages(self, work: Work) -> list[Loss]:
        """Run the turns of all stages."""
        return self.runner.run(work)

    def _drawing(self, number: int, streams: Streams) -> AbstractContextManager[Any]:
        """Draw from a micro-batch's own random stream in this context, if it needs one.

        In a job's training the stream has the seed that ``begin_part`` gives.

        Args:
            number: of the micro-batch.
            streams: of the micro-batches of this update, where nobody seeds them.
        """
        if not self.runner.streamed:
            return nullcontext()
        numbers = self.draws.stream
        if numbers is None:
            return stream(lambda: streams.generator(number))
        if number:
            numbers = (*numbers, number)
        key = mixed(*numbers)
        return stream(lambda: torch.Generator().manual_seed(key))

    def _move_parameters(self, size: int, count: Number) -> None:
        """Weight and clip the gradients, and let the optimizer make its step."""
        if not self._is_small:
            super()._move_parameters(size, count)
            return
        # A second thread waited for 6 to 12 ms behind the first, until the system moved it to the
        # core that the last stage had left (Linux 6.18). In that time one thread updates some
        # million parameters.
        with occupied(Device("cpu", 0)):
            super()._move_parameters(size, count)

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts; what meets on different devices is moved."""
        with self.staged.moving():
            super()._check_sums(batch)
