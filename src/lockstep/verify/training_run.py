"""One side: a job in training under one strategy on this rank, an update at a time, with all that
is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part, eval_loaders, resolve, resolve_sets
from lockstep.job import Job
from lockstep.launch.observer import Observer
from lockstep.launch.world import World
from lockstep.model.build import refuse_given_twice
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result
from lockstep.tensors.pytree import each
from lockstep.tensors.rows import has_rows, holds_samples
from lockstep.tensors.seeding import same, states
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.scheduler import move_on, scheduler_of
from lockstep.verify.batches import EPOCHS, Excerpt, evaluated_places, places_of
from lockstep.verify.comparison import Experiment
from lockstep.verify.determinism import hold_norms, still, without_draws
from lockstep.verify.layer_watch import Watch

_FACTOR = 1 + 2.0**-21
"""A loss whose sums are taken in another order is multiplied by this, and its gradients divided. In
float64 that changes nothing. What a model computes in float32 inside is rounded otherwise, as it is
where a mean is over fewer samples.
"""


class Side(Observer):
    """A job under one strategy.

    Args:
        job: the job; its batches are cut as the strategy cuts them.
        world: this rank's place.
        experiment: what is changed on this side.

    Attributes:
        batch: the last one.
        result: of the last update.
        gradients: by name, of the last update, as they were before clipping; on every rank.
        rates: learning rates that the last update was made with.
        drew: whether the first update drew random numbers.

    Raises:
        JobError: the model is the same each time.
    """

    batch: Batch
    result: Result
    gradients: dict[str, torch.Tensor]
    rates: tuple[float, ...]

    def __init__(self, job: Job, world: World, experiment: Experiment) -> None:
        loss = job.loss
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss)
        every = job.check_every if experiment.checked else 0
        # What the sum check finds ends a training; a comparison shows more of it.
        job = job.replace(loss=loss, check_every=every, accept_differences=True)
        job = without_draws(job, experiment.still)

        self.job = job
        self.world = world
        self._experiment = experiment
        self._accelerators = [device.torch for device in world.devices if not device.is_slot]

        self.data = resolve(job.train_data, world, "train_data")
        self.step: Step = experiment.strategy.prepare(job, world)
        refuse_given_twice(self.step.model)
        if "norms" in experiment.still:
            for model in self.step.models():
                hold_norms(model)

        self.scheduler = scheduler_of(job, self.step)
        self.loader = experiment.strategy.training_loader(job, world, self.data)

        self.watch = Watch()
        self.drew = False
        self._number = 0
        self._total = 0.0
        self._count = 0.0
        self.step.observers.append(self)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """Give the batches to train on, and whether each is the last one of its epoch here."""
        for epoch in range(EPOCHS):
            places = places_of(self.loader, self.job, epoch)
            for batch in Excerpt(self.loader, places).epoch(epoch):
                yield batch, batch.index == places[-1]

    def update(self, batch: Batch, is_last: bool) -> None:
        """Make one update as the training loop does.

        Args:
            batch: to train on.
            is_last: whether it is the last one of its epoch here: then the scheduler may move on.
        """
        self.batch = batch
        self.gradients = {}
        self._number += 1
        groups = self.step.optimizer.param_groups
        self.rates = tuple(float(group.get("lr", 0.0)) for group in groups)
        if self._experiment.shuffled:
            batch = shuffled(batch)

        self.step.seed(self.job.seed)
        self._generators = states(self._accelerators)
        looking: AbstractContextManager[None] = nullcontext()
        if self._number == self._experiment.watched:
            looking = self.watch.looking(self.step.models())
        with looking:
            result = self.step.update(batch)
        self._see_draws()

        total, count = map(float, self.step.over_ranks(result.sums))
        self.result = Result(total, count, result.size)
        self._move_scheduler(is_last)

    def _move_scheduler(self, is_last: bool) -> None:
        """Move the scheduler on, as the training loop does."""
        if self.job.lr_scheduler_every == "step":
            move_on(self.scheduler, self.result)
            return

        self._total += float(self.result.total)
        self._count += float(self.result.count)
        if is_last:
            mean = self._total / self._count if self._count else 0.0
            move_on(self.scheduler, mean)
            self._total = 0.0
            self._count = 0.0

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the metrics over some batches of each evaluation set."""
        job = self.job
        if job.eval_data is None:
            return {}

        sets = resolve_sets(job.eval_data, self.world)
        excerpts: Any = {}
        for name, loader in eval_loaders(job, self.world, sets).items():
            places = evaluated_places(loader)
            excerpts[name] = Excerpt(loader, places)
        return evaluate_sets(self.step, excerpts, job)

    # ---- what is looked at in an update ----------------------------------------------------------

    def gradients_ready(self) -> None:
        """Copy the gradients, before they are clipped."""
        if self._experiment.shuffled:
            for p in self.step.model.parameters():
                if p.grad is not None:
                    p.grad.div_(_FACTOR)
        for name, grad in self.step.layout.gradients().items():
            self.gradients[name] = grad.detach().clone()

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Leave out that a micro-batch is given a random stream of its own."""
        self._see_draws()
        yield
        self._generators = states(self._accelerators)

    def _see_draws(self) -> None:
        """Note whether the first update has drawn random numbers since the last look."""
        if self._number == 1 and not same(self._generators, states(self._accelerators)):
            self.drew = True

    @contextmanager
    def backward(self, total: torch.Tensor, *, sums: bool) -> Iterator[None]:
        """Draw nothing here either that is out of the model."""
        if self._experiment.shuffled:
            total.register_hook(lambda grad: grad * _FACTOR)  # type: ignore[no-untyped-call]
        with still(self._experiment.still):
            yield

    def forwarded(self, where: str, part: Part, outputs: Any) -> None:
        """Add what the layers gave for a part of the batch."""
        self.watch.forwarded()


def shuffled(batch: Batch) -> Batch:
    """Return the batch with the rows of each micro-batch mixed.

    So sums over them are taken in another order.
    """
    parts = []
    for number, part in enumerate(batch.parts):
        generator = torch.Generator().manual_seed(number + 1)
        order = torch.randperm(part.size, generator=generator)
        inputs, targets = _in_order((part.inputs, part.targets), order)
        mixed = replace(part, inputs=inputs, targets=targets, samples=None)
        parts.append(mixed)

    return replace(batch, parts=parts)


def _in_order(nest: Any, order: torch.Tensor) -> Any:
    """Return samples in another order; what has no row for each stays."""
    size = len(order)

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's rows in the other order."""
        if has_rows(tensor, size):
            return tensor[order.to(tensor.device)]
        return tensor

    def of_list(items: list[Any] | tuple[Any, ...]) -> list[Any] | None:
        """Return the items in the other order, if there is one for each sample."""
        if holds_samples(items, size):
            return [items[i] for i in order.tolist()]
        return None

    return each(of_tensor, nest, on_list=of_list, on_packed=lambda packed: packed)
