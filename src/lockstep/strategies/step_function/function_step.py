"""The step of a job with several losses and optimizers: ``Job(step=function)``.

The function is ordinary code, which each replica runs on its share of the global batch::

    def step(models, batch, update):
        images, noise = batch
        drawn = models["generator"](noise)
        update("discriminator", judged(models, images, drawn.detach()), len(images))  # total, count
        update("generator", fooled(models, drawn), len(images))

Each call of ``update`` does what any update does: backward of total / n into the parameters of that
optimizer alone, n being the samples of the global batch; the sum over replicas; times n / count;
clipping; that optimizer's step. So what the function computes afterwards sees the moved parameters,
on every replica alike.

Replicas meet in each call, and have to make the same calls in the same order. A rank without a
sample runs the function on some samples of another rank, and adds nothing: so what the function
writes, freezes or counts is alike on all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, NonFiniteLoss, StrategyError, nearest
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizers.several import Optimizers
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.reducers import FlatReducer
from lockstep.strategies.step_function.function_losses import SummedFunction, Update
from lockstep.strategies.steps.skipped_updates import no_items
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_checks import EXPLAINED, refuse_counted
from lockstep.strategies.steps.update_result import NOTHING, Result, added
from lockstep.strategies.steps.weighting import backward_factor
from lockstep.tensors.pytree import to_device
from lockstep.tensors.rows import cut

_END = -1
"""What a rank sends at the end of the function, instead of the number of an optimizer."""

_LENT = 4
"""The number of samples that a rank without one is lent."""


class FunctionStep(Step):
    """Calls the function on this process's share; a base class before the step of a strategy.

    Args:
        model: has a part for each optimizer.
        optimizer: holds those of all names.
        job: has the function.
        world: of this process.
        others: what the step of the strategy takes beside these.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        *others: Any,
    ) -> None:
        super().__init__(model, optimizer, job, world, *others)
        assert isinstance(optimizer, Optimizers) and job.step is not None
        self._function = job.step
        self._by_name = optimizer
        self._order = list(optimizer.by_name)
        self.part_names.known = tuple(self._order)
        # By the name of each optimizer, the parameters that it moves; they may be shared.
        self._parameters_of: dict[str, list[nn.Parameter]] = {}
        self._reducers: dict[str, FlatReducer] = {}
        for name in self._order:
            part = model.get_submodule(name)
            own = set(map(id, part.parameters()))
            self._parameters_of[name] = [p for p in self.trained.values if id(p) in own]
            self._reducers[name] = FlatReducer(model, world)
        self._losses_of: dict[str, list[Loss]] = {}
        self._has_samples = True
        # The updates before this step was made.
        self._loaded = 0

    def update(self, batch: Batch | None = None) -> Result:
        """Make the updates of the function on a batch; the loss is the sum of those of all names.

        Raises:
            StrategyError: there is no batch: gradients were given by ``backward``.
        """
        if batch is None:
            self._refuse_gradients()
        self._look_at_flags()
        self._losses_of = {}
        self._begin_update(batch)
        self._clear_gradients()
        try:
            self.run_function(batch)
        except EXPLAINED as error:
            self._explain(error, batch)
            raise
        parts = dict.fromkeys(self._order, NOTHING)
        mean: Number = 0.0
        for name, losses in self._losses_of.items():
            total, count = added(losses)
            parts[name] = (total, count)
            # On an accelerator the mean over no item is NaN, which is found later.
            mean = mean + total / count
        result = Result(mean * batch.size, batch.size, batch.size, parts)
        self._end(result)
        return result

    def run_function(self, batch: Batch) -> None:
        """Run the function on this process's share, and meet the other ranks at the end."""
        part = batch.parts[0]
        self._has_samples = bool(part.size)
        part = self._lent(part)
        self.draws.begin_part(0)
        self._call(self.placed(part), batch.size)
        self._agree(_END)

    @phase("computing", "step function")
    def _call(self, part: Part, samples: int) -> None:
        """Call the function.

        Args:
            part: the samples that it is given.
            samples: of the global batch.
        """

        def take(name: str, loss: Loss) -> None:
            self._make_update(name, loss, samples)

        with self._precision.autocast():
            update = Update(take, self.number, samples)
            self._function(self.model, (part.inputs, part.targets), update)

    # ---- one call of ``update`` ------------------------------------------------------------------

    def _make_update(self, name: str, loss: Loss, samples: int) -> None:
        """Make one step of the optimizer of that name.

        Args:
            name: of the optimizer.
            loss: of this process's share.
            samples: of the global batch.

        Raises:
            InputError: there is no such optimizer, or the replicas make different calls.
        """
        if name not in self._parameters_of:
            near = nearest(str(name), self._order)
            raise InputError(f'update("{name}"): there is no such optimizer; {near}')
        mine = Loss(0.0, 0)
        if self._has_samples:
            self._backward_into(name, loss, samples)
            mine = loss.detached()
        self._agree(self._order.index(name))
        if self.world.size > 1:
            mine = self._sum_over_ranks_of(name, mine)
        self._move(name, mine, samples)

    @phase("computing", "backward")
    def _backward_into(self, name: str, loss: Loss, samples: int) -> None:
        """Add the gradient of total / ``samples``, or total / count, to those of an optimizer.

        Raises:
            NonFiniteLoss: the total isn't finite.
            LossError: the total depends on no parameter.
        """
        total = loss.total
        if not self._on_accelerator and not math.isfinite(total.item()):
            raise NonFiniteLoss(
                f'update("{name}"): the loss became {total.item()} at step {self.world.step} on '
                f"{self.world.device}"
            )
        trained = [p for p in self._parameters_of[name] if p.requires_grad]
        if not trained:
            # That part of the model is frozen now.
            return
        if not total.requires_grad:
            refuse_counted(loss, f'update("{name}"): ')
            return
        divisor = loss.count if self._by_count else samples
        factor = backward_factor(total, divisor, waits=not self._on_accelerator)
        self._run_backward(total, factor, trained)

    def _move(self, name: str, loss: Loss, samples: int) -> None:
        """Weight and clip summed gradients, and let the optimizer of that name make its step.

        Args:
            name: of the optimizer.
            loss: of the global batch.
            samples: of the global batch.

        Raises:
            RunError: the loss counted no item.
        """
        is_on_device = self._on_accelerator and isinstance(loss.count, torch.Tensor)
        if not is_on_device and float(loss.count) == 0:
            raise no_items(self.world.step)
        self._losses_of.setdefault(name, []).append(loss)
        self._by_name.active = name
        self._move_parameters(samples, loss.count)
        # Fused optimizers leave versions as they are: a later backward of what was computed before
        # would take the moved weights.
        moved = [p for p in self._parameters_of[name] if p.requires_grad]
        torch.autograd.graph.increment_version(moved)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for p in self.trained.values:
            p.grad = None

    # ---- between ranks ---------------------------------------------------------------------------

    def _lent(self, part: Part) -> Part:
        """Give this rank's samples, or some of the first rank that has any."""
        if self.world.size == 1:
            return part
        has_each_some = part.of >= self.world.size
        if has_each_some and not self.own_loop:
            return part
        sizes = [size for (size,) in over_ranks(self.world, part.size)]
        if all(sizes):
            return part
        source = next(rank for rank, size in enumerate(sizes) if size)
        mine = part
        if self.world.rank == source:
            mine = _some_of(part)
        lent = self.world.broadcast_object(mine, source)
        return part if part.size else lent

    def _agree(self, mine: int) -> None:
        """Make sure that all ranks make the same call now.

        Args:
            mine: the number of an optimizer, or ``_END``.

        Raises:
            InputError: the ranks make different calls.
        """
        codes = [code for (code,) in over_ranks(self.world, mine)]
        if len(set(codes)) == 1:
            return
        calls = []
        for rank, code in enumerate(codes):
            call = "ends"
            if code != _END:
                call = f"calls update({self._order[code]!r})"
            calls.append(f"replica {rank} {call}")
        listed = ", ".join(calls)
        raise InputError(
            f"step function: in step {self.world.step} {listed}: each replica has to "
            "make the same calls, so choose them by update.step, not by the samples of a local "
            "batch, nor by a counter of your own"
        )

    @phase("communicating", "reduce")
    def _sum_over_ranks_of(self, name: str, loss: Loss) -> Loss:
        """Sum the loss, and the gradients of its optimizer, over the ranks."""
        numbers = [self.world.asked_to_stop(), *loss]
        asked, total, count = self._reducers[name].sum(self._parameters_of[name], numbers)
        self.checks.agree_to_stop(asked)
        return Loss(total, count)

    # ---- what other steps do otherwise -----------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the update, from 1; in an own loop, without those of other steps."""
        if self.own_loop:
            return self._loaded + self._updates
        return self.world.step

    def load(self, folder: str | Path) -> None:
        """Take over the checkpoint that ``save`` wrote, and go on counting updates from there."""
        super().load(folder)
        self._loaded = self.world.step - self._updates

    def _check_sums(self, batch: Batch) -> None:
        """Check that the losses of the function are the sums of those of parts of a batch.

        Raises:
            StrategyError: a loss isn't.
        """
        if not self.sums.is_due(self._updates):
            return
        summed = SummedFunction(
            self.model,
            self._function,
            self.number,
            batch.size,
        )
        self.sums.check(batch, summed)

    def gradients(self, batch: Batch) -> Loss:
        """Refuse to compute gradients: there are several losses.

        Raises:
            StrategyError: always.
        """
        self._refuse_gradients()

    def _refuse_gradients(self) -> NoReturn:
        raise StrategyError(
            "a step function makes updates itself: call step(inputs, targets), not backward and "
            "update"
        )


def _some_of(part: Part) -> Part:
    """Give a few samples of a share, to be sent to another rank."""
    size = min(part.size, _LENT)
    nest = part.inputs, part.targets
    first = cut(nest, 0, size, part.size)
    inputs, targets = to_device(first, torch.device("cpu"))
    return Part(inputs, targets, size, part.of)
