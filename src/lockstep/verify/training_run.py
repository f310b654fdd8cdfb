"""One side: a job in training under one strategy on this rank, an update at a time, with all that is looked at."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part, eval_loaders, resolve, resolve_sets
from lockstep.errors import LockstepError
from lockstep.job import Job
from lockstep.jobfile import the_job, with_settings
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.inspection import acting_buffers
from lockstep.model.optimizer import build_optimizer
from lockstep.strategies import Strategy
from lockstep.strategies.single import SingleStep
from lockstep.strategies.step import Result, Step
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import each, tensors
from lockstep.tensors.seeding import same, same_others, states
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.scheduler import move_on, scheduler_of
from lockstep.verify.batches import EPOCHS, Excerpt, begun
from lockstep.verify.comparison import Experiment, row_ids
from lockstep.verify.determinism import Thing, hold_still, still_backward
from lockstep.verify.layer_watch import Watch


class Side:
    """A job under one strategy.

    Args:
        job: as the strategy is told of it; the batches are cut as the strategy wants them.
        world: this rank's place.
        strategy: which builds the step.
        still: what is taken out of the model.
        watched: the number of the update in which every layer is looked at.
        shuffled: mix the rows of each micro-batch, so that sums are taken in another order.
        more: batches of the first epoch that are taken beside.

    Attributes:
        rows: ids of the samples that the last update's forwards were given, in order, as far as they are seen.
        gradients: by name, of the last update, as they were before clipping; on every rank.
        rates: learning rates that the last update was made with.
        drew, drew_elsewhere: whether the last update moved a random generator; whether Python's or numpy's.
        drew_in_backward: whether the backward of some update did. (What other threads draw meanwhile counts too.)
        changed: buffers that the last update changed, for each replica of this process.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        strategy: Strategy,
        *,
        still: frozenset[Thing] = frozenset(),
        watched: int = 0,
        shuffled: bool = False,
        more: tuple[int, ...] = (),
    ) -> None:
        job = job.replace(loss=_own_loss(job))
        self.job, self.world = job, world
        self.shuffled = shuffled
        self._more = more
        self._accelerators = tuple({device.torch: None for device in world.devices if not device.is_slot})
        self.data = resolve(job.train_data, world, "train_data")
        data = begun(self.data, job.batch_size)
        self.step: Step = strategy.build(job, world)
        for model in self.step.models():
            hold_still(model, still)
        self.scheduler = scheduler_of(job, self.step)
        self.loader = strategy.training_loader(job, world, data)
        self.watch = Watch() if watched else None
        self._watched = watched
        self._number = 0
        self.gradients: dict[str, torch.Tensor] = {}
        self.rates: tuple[float, ...] = ()
        self.rows: list[bytes] = []
        self.drew = self.drew_elsewhere = self.drew_in_backward = False
        self.changed: list[set[str]] = []
        self.functions: set[str] = set()
        self._attributes = plain_attributes(self.step.model)
        self._totals = [0.0, 0.0]
        self._clip = self.step.clip
        self.step.clip = self._clipped  # type: ignore[method-assign]
        self.step.on_forward = self._saw
        self._begin_part = self.step.begin_part
        self.step.begin_part = self._begins_part  # type: ignore[method-assign]
        self._backward = still_backward(self.step.backward, still)
        self.step.backward = self._went_back  # type: ignore[method-assign]

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """The batches of the course, and whether each is the last one of its epoch here."""
        for epoch in range(EPOCHS):
            held: Batch | None = None
            for batch in Excerpt(self.loader, self.job.batch_size, self._more).epoch(epoch):
                if held is not None:
                    yield held, False
                held = batch
            if held is not None:
                yield held, True

    def update(self, batch: Batch) -> Result:
        """One update, as the training loop makes it."""
        self.rows, self.gradients = [], {}
        self._number += 1
        self.rates = tuple(float(group.get("lr", 0.0)) for group in self.step.optimizer.param_groups)
        before = [{name: digest(b) for name, b in acting_buffers(model).items()} for model in self.step.models()]
        self.step.seed(self.job.seed)
        self.drew = self.drew_elsewhere = False
        self._generators = states(self._accelerators)
        with self._watching():
            result = self.step.update(shuffled(batch) if self.shuffled else batch)
        self._see_draws()
        self.changed = [
            {name for name, b in acting_buffers(model).items() if digest(b) != values.get(name)}
            for model, values in zip(self.step.models(), before, strict=True)
        ]
        total, count = self.step.over_ranks(result.total, result.count)
        result = Result(float(total), float(count), result.size)
        self._totals[0] += float(total)
        self._totals[1] += float(count)
        if self.scheduler is not None and self.job.lr_scheduler_every == "step":
            move_on(self.scheduler, result)
        return result

    def _watching(self) -> AbstractContextManager[None]:
        if self.watch is None or self._number != self._watched:
            return nullcontext()
        return self.watch.looking(self.step.models())

    def end_epoch(self) -> None:
        """What the loop does between epochs."""
        total, count = self._totals
        self._totals = [0.0, 0.0]
        if self.scheduler is not None and self.job.lr_scheduler_every == "epoch":
            move_on(self.scheduler, total / count if count else 0.0)

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics over some batches of each evaluation set."""
        if self.job.eval_data is None:
            return {}
        size = self.job.eval_batch_size or self.job.batch_size
        sets = {name: begun(data, size) for name, data in resolve_sets(self.job.eval_data, self.world).items()}
        loaders: Any = {
            name: Excerpt(loader, None) for name, loader in eval_loaders(self.job, self.world, sets).items()
        }
        return evaluate_sets(self.step, loaders, self.job.metrics, self.world, self.job.seed)

    def changed_attributes(self) -> dict[str, Any]:
        """Plain attributes of modules that are other ones than at the start, with a print of their values."""
        now = plain_attributes(self.step.model)
        return {name: value for name, value in now.items() if value != self._attributes.get(name)}

    def _clipped(self) -> None:
        grads = {name: p.grad for name, p in self.step.model.named_parameters() if p.grad is not None}
        changes = self.job.clip_norm is not None or type(self.step).clip is not Step.clip
        self.gradients = {name: g.detach().clone() if changes else g.detach() for name, g in grads.items()}
        self._clip()

    def _begins_part(self, number: int) -> None:
        """A micro-batch of a process with one replica begins, with a random stream of its own."""
        self._see_draws()
        self._begin_part(number)
        self._generators = states(self._accelerators)

    def _see_draws(self) -> None:
        now = states(self._accelerators)
        self.drew |= not same(self._generators, now)
        self.drew_elsewhere |= not same_others(self._generators.others, now.others)

    def _went_back(self, total: torch.Tensor, factor: float) -> None:
        if self._number > 1:
            self._backward(total, factor)
            return
        generators = states(self._accelerators)
        self._backward(total, factor)
        self.drew_in_backward |= not same(generators, states(self._accelerators))

    def _saw(self, where: str, part: Part, outputs: Any) -> None:
        """A forward; replicas on threads have theirs at the same time."""
        del where
        self.rows.extend(row_ids(part.inputs, part.targets, part.size) or ())
        if self.watch is not None:
            self.watch.forwarded(part)
        if not self.functions:
            self.functions.update(own_functions(outputs))


def _own_loss(job: Job) -> Any:
    """A loss that is a module, for this side alone: it may count its calls."""
    try:
        return copy.deepcopy(job.loss) if isinstance(job.loss, nn.Module) else job.loss
    except Exception:
        return job.loss


def shuffled(batch: Batch) -> Batch:
    """The batch with the rows of each micro-batch in another order; parts whose tensors have no rows stay."""
    parts = []
    for number, part in enumerate(batch.parts):
        order = torch.randperm(part.size, generator=torch.Generator().manual_seed(number + 1)) if part.size else None

        def mixed(tensor: torch.Tensor, order: torch.Tensor | None = order, size: int = part.size) -> torch.Tensor:
            if order is None or not tensor.dim() or tensor.shape[0] != size:
                return tensor
            return tensor[order.to(tensor.device)]

        def listed(items: list[Any], order: torch.Tensor | None = order, size: int = part.size) -> list[Any] | None:
            return [items[i] for i in order.tolist()] if order is not None and len(items) == size else None

        given = each(mixed, (part.inputs, part.targets), on_list=listed, on_packed=lambda packed: packed)
        parts.append(Part(given[0], given[1], part.size, part.of))
    return Batch(parts, batch.size, batch.index, batch.epoch, batch.samples)


def plain_attributes(model: nn.Module) -> dict[str, bytes]:
    """A print of every attribute of a module that is neither parameter, buffer nor module: ``{"body.calls": ...}``.

    What can't be pickled is left out, and so are the model's own tensors in what it holds (an RNN lists its weights).
    """
    own = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_EVERY_MODULE or isinstance(value, nn.Module) or callable(value):
                continue
            try:
                found[f"{name}.{key}" if name else key] = _print_of(value, own)
            except Exception:
                continue
    return found


def _print_of(value: Any, own: dict[int, str]) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, held: Any) -> str | None:
            return own.get(id(held)) if isinstance(held, torch.Tensor) else None

    written = io.BytesIO()
    Pickler(written).dump(value)
    return written.getvalue()


_OF_EVERY_MODULE = {*vars(nn.Module()), "_compiled_call_impl", "forward"}


def own_functions(outputs: Any) -> set[str]:
    """The autograd functions in the graph of some outputs that are written in Python: their names."""
    todo = [t.grad_fn for t in tensors(outputs) if t.grad_fn is not None]
    seen: set[Any] = set(todo)
    found: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kind: Any = getattr(node, "_forward_cls", type(node))
            if not kind.__module__.startswith(("torch.", "lockstep.")):
                found.add(kind.__name__)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def moves_of(experiment: Experiment, rates: tuple[float, ...], *, most: int) -> int | None:
    """After how many moves the job's scheduler gives these learning rates; None where it isn't found to.

    Args:
        experiment: with the job.
        rates: group by group.
        most: moves to look at.
    """
    job = the_job(with_settings(experiment.job, experiment.settings))
    world = World(devices=experiment.devices[:1])
    try:
        model = build_model(job, world, place=False)
        step = SingleStep(model, build_optimizer(job, model), job, world)
        scheduler = scheduler_of(job, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no update is made in between, on purpose
            for moves in range(most + 1):
                now = [float(group["lr"]) for group in step.optimizer.param_groups]
                if all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(now, rates, strict=True)):
                    return moves
                scheduler.step()
    except (LockstepError, TypeError, AttributeError):  # a scheduler that wants to see losses, say
        return None
    return None
