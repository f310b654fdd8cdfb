"""One side: a job in training under one strategy on this rank, an update at a time, with all
that is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part, eval_loaders, resolve, resolve_sets
from lockstep.job import Job
from lockstep.launch.observer import Observer
from lockstep.launch.world import World
from lockstep.model.build import refuse_given_twice
from lockstep.model.inspection import acting_buffers, attribute_prints
from lockstep.model.inspection.nonlinear import own_functions
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import each
from lockstep.tensors.rows import holds_samples
from lockstep.tensors.seeding import same, same_others, states
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.scheduler import move_on, scheduler_of
from lockstep.verify.batches import EPOCHS, Excerpt, begun, evaluated_places, places_of
from lockstep.verify.comparison import Experiment, row_ids
from lockstep.verify.determinism import hold_norms, still, without_draws
from lockstep.verify.layer_watch import Watch

_FACTOR = 1 + 2.0**-21
"""Of a loss whose sums are taken in another order; its gradients lose it again. In float64 that
changes nothing. What a model computes in float32 inside is rounded otherwise, as it is where a mean
is over fewer samples.
"""


class Side(Observer):
    """A job under one strategy.

    Args:
        job: as the strategy is told of it; the batches are cut as the strategy wants them.
        world: this rank's place.
        experiment: of which this is the side in question.

    Attributes:
        rows: ids of the samples that the last update's forwards were given, in order, as far as
            they are seen.
        gradients: by name, of the last update, as they were before clipping; on every rank.
        rates: learning rates that the last update was made with.
        drew: from where the first update drew random numbers, as in ``Comparison``. (Other threads'
            draws count too.)
        buffers: digests of what they are at the start.
        functions: autograd functions that are not PyTorch's own, in the graph of the first
            forwards.

    Raises:
        JobError: the model is the same each time.
    """

    def __init__(self, job: Job, world: World, experiment: Experiment) -> None:
        # Before the strategy has the model: it may copy it, or take a later change for the
        # person's.
        # The sum check in a training would end it where a comparison shows more.
        job = job.replace(loss=_own_loss(job), check_every=0)
        job = without_draws(job, experiment.still)
        self.job, self.world, self._experiment = job, world, experiment
        self._accelerators = tuple(
            {device.torch: None for device in world.devices if not device.is_slot}
        )
        self.data = resolve(job.train_data, world, "train_data")
        self.step: Step = experiment.strategy.prepare(job, world)
        refuse_given_twice(self.step.model)
        self.step.sums.last = 0  # the comparison finds what the check would refuse
        if "norms" in experiment.still:
            for model in self.step.models():
                hold_norms(model)
        self.scheduler = scheduler_of(job, self.step)
        self.loader = experiment.strategy.training_loader(
            job, world, begun(self.data, job.batch_size)
        )
        self.watch = Watch()
        self._number = 0
        self.gradients: dict[str, torch.Tensor] = {}
        self.rates: tuple[float, ...] = ()
        self.rows: list[bytes] = []
        self.drew: set[str] = set()
        self.functions: set[str] = set()
        self._attributes = attribute_prints(self.step.model)
        self.buffers = buffer_digests(self.step.model)
        self._totals = [0.0, 0.0]
        self._scaled = False  # by _FACTOR
        self.step.observers.append(self)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """The batches of the course, and whether each is the last one of its epoch here."""
        for epoch in range(EPOCHS):
            held: Batch | None = None
            places = places_of(self.loader, self.job.batch_size, epoch, self._experiment.more)
            for batch in Excerpt(self.loader, places).epoch(epoch):
                if held is not None:
                    yield held, False
                held = batch
            if held is not None:
                yield held, True

    def update(self, batch: Batch, is_last: bool) -> Result:
        """One update, as the training loop makes it; after the last one of an epoch, what it
        does between epochs.
        """
        self.rows, self.gradients = [], {}
        self._number += 1
        self.rates = tuple(
            float(group.get("lr", 0.0)) for group in self.step.optimizer.param_groups
        )
        self.step.seed(self.job.seed)
        self._generators = states(self._accelerators)
        with self._watching():
            result = self.step.update(shuffled(batch) if self._experiment.shuffled else batch)
        self._see_draws()
        total, count = map(float, self.step.over_ranks(result.sums))
        result = Result(total, count, result.size)
        self._totals = [self._totals[0] + total, self._totals[1] + count]
        if self.job.lr_scheduler_every == "step":
            move_on(self.scheduler, result, self.step)
        elif is_last:
            move_on(
                self.scheduler,
                self._totals[0] / self._totals[1] if self._totals[1] else 0.0,
                self.step,
            )
        if is_last:
            self._totals = [0.0, 0.0]
        return result

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics over some batches of each evaluation set."""
        if self.job.eval_data is None:
            return {}
        size = self.job.eval_batch_size or self.job.batch_size
        sets = {
            name: begun(data, size)
            for name, data in resolve_sets(self.job.eval_data, self.world).items()
        }
        loaders: Any = {
            name: Excerpt(loader, evaluated_places(loader))
            for name, loader in eval_loaders(self.job, self.world, sets).items()
        }
        return evaluate_sets(self.step, loaders, self.job.metrics, self.world, self.job.seed)

    def changed_attributes(self) -> dict[str, bytes]:
        """Plain attributes of modules that are other ones than at the start, with a print of
        their values.
        """
        now = attribute_prints(self.step.model)
        return {name: value for name, value in now.items() if value != self._attributes.get(name)}

    # ---- what is looked at in an update ----------------------------------------------------------

    def _watching(self) -> AbstractContextManager[None]:
        watched = self._number == self._experiment.watched
        return self.watch.looking(self.step.models()) if watched else nullcontext()

    def gradients_ready(self) -> None:
        """Take note of them, before they are clipped."""
        if self._scaled:
            for p in self.step.model.parameters():
                if p.grad is not None:
                    p.grad.div_(_FACTOR)
        grads = self.step.gathered_gradients()
        changes = self.job.clip_norm is not None or type(self.step).clip is not Step.clip
        self.gradients = {
            name: g.detach().clone() if changes else g.detach() for name, g in grads.items()
        }

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """A micro-batch of a process with one replica begins, with a random stream of its own."""
        self._see_draws()
        yield
        self._generators = states(self._accelerators)

    def _see_draws(self) -> None:
        now = states(self._accelerators)
        if self._number == 1 and not same(self._generators, now):
            self.drew.add("somewhere")
            if not same_others(self._generators.others, now.others):
                self.drew.add("elsewhere")

    @contextmanager
    def backward(self, total: torch.Tensor, *, sums: bool) -> Iterator[None]:
        """Take note of what it draws; what is out of the model isn't drawn here either."""
        if self._experiment.shuffled:
            self._scaled = True
            total.register_hook(lambda grad: grad * _FACTOR)  # type: ignore[no-untyped-call]
        generators = states(self._accelerators) if self._number == 1 else None
        with still(self._experiment.still):
            yield
        if generators is not None and not same(generators, states(self._accelerators)):
            self.drew.add("backward")

    def forwarded(self, where: str, part: Part, outputs: Any) -> None:
        """A forward; replicas on threads have theirs at the same time."""
        del where
        self.rows.extend(row_ids(part.inputs, part.targets, part.size) or ())
        self.watch.forwarded()
        if not self.functions:
            self.functions.update(own_functions(outputs))


def _own_loss(job: Job) -> Any:
    """A loss that is a module, for this side alone: it may count its calls."""
    try:
        return copy.deepcopy(job.loss) if isinstance(job.loss, nn.Module) else job.loss
    except Exception:
        return job.loss


def shuffled(batch: Batch) -> Batch:
    """The batch with the rows of each micro-batch in another order, so that sums are taken in
    another order.
    """
    parts = []
    for number, part in enumerate(batch.parts):
        order = torch.randperm(part.size, generator=torch.Generator().manual_seed(number + 1))
        inputs, targets = _in_order((part.inputs, part.targets), order)
        parts.append(Part(inputs, targets, part.size, part.of))
    return Batch(parts, batch.size, batch.index, batch.epoch, batch.samples)


def _in_order(nest: Any, order: torch.Tensor) -> Any:
    """Samples in another order; what has no row for each stays."""
    size = len(order)

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor[order.to(tensor.device)] if tensor.dim() and tensor.shape[0] == size else tensor
        )

    def of_list(items: list[Any] | tuple[Any, ...]) -> list[Any] | None:
        return [items[i] for i in order.tolist()] if holds_samples(items, size) else None

    return each(of_tensor, nest, on_list=of_list, on_packed=lambda packed: packed)


def buffer_digests(model: nn.Module) -> dict[str, Any]:
    """By name, what tells the values of buffers from others; running statistics, which don't
    act, are left out.
    """
    return {name: digest(b) for name, b in acting_buffers(model).items()}
