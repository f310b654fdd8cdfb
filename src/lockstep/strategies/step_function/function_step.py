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
sample runs the function on the samples of another rank, and adds nothing: so what the function
writes, freezes or counts is alike on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, LossError, nearest
from lockstep.launch.observer import phase
from lockstep.launch.processes.pickling import closed_over
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number, is_number
from lockstep.model.losses.torch_losses import HALF
from lockstep.model.optimizers.several import Optimizers
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.reducers import FlatReducer
from lockstep.strategies.steps.manual_accumulation import refuse_other_calls
from lockstep.strategies.steps.skipped_updates import no_items, not_finite
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_checks import refuse_counted
from lockstep.strategies.steps.update_result import added
from lockstep.strategies.sums.sums_of_pieces import Piece, Summed
from lockstep.tensors.pytree import clones, described, to_device

_END = -1
"""What a rank sends at the end of the function, instead of the number of an optimizer."""

StepFunction = Callable[..., None]
"""``step(models, batch, update)``"""


class Update:
    """The argument that a step function calls: ``update("generator", total, count)``.

    Args:
        take: is called with each name and its loss.
        step: see below.
        samples: see below.

    Attributes:
        step: the number of this step, from 1, the same on every device.
        samples: of the global batch.
    """

    def __init__(self, take: Callable[[str, Loss], None], step: int, samples: int) -> None:
        self._take = take
        self.step = step
        self.samples = samples

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        """Make one step of the optimizer of that name.

        Args:
            name: of the optimizer, and of the part of the model that it moves.
            total: the sum of the loss over items, a scalar tensor.
            count: the number of items; a loss without it is refused.

        Raises:
            InputError: there is no such optimizer, or the replicas make different calls.
            LossError: the total is no scalar, has no count, or doesn't depend on the parameters of
                that part.
        """
        self._take(name, _as_loss(name, total, count))


def _as_loss(name: str, total: Any, count: Any) -> Loss:
    """Make a loss of the arguments of ``update``.

    Raises:
        LossError: the total is no scalar tensor, or the count is no number.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        raise LossError(
            f'update("{name}"): the loss is {described(total)}, a scalar tensor is expected'
        )
    if not is_number(count) or (isinstance(count, torch.Tensor) and count.requires_grad):
        raise LossError(
            f'update("{name}"): the count is {count!r}: give the sum over items, and the number of '
            f'items: update("{name}", total, count)'
        )
    if total.dtype in HALF:
        total = total.float()
    return Loss(total, count)


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
        self._reducer = FlatReducer(model, world)
        for name in self._order:
            part = model.get_submodule(name)
            own = set(map(id, part.parameters()))
            self._parameters_of[name] = [p for p in self.trained.values if id(p) in own]
        self._losses_of: dict[str, list[Loss]] = {}
        self.accumulation.why_whole = (
            "a step function makes updates itself: call step(inputs, targets), not backward and "
            "update"
        )

    def gradients(self, batch: Batch) -> Loss:
        """Make the updates of the function on a batch, and meet the other ranks at the end.

        Returns:
            The sum of the losses of all names, as that of every sample, with a part for each name.
        """
        self._losses_of = {}
        self._clear_gradients()
        self.draws.begin_part(0)
        self._call(self._lent(batch.parts[0]), batch)
        self._agree(_END)
        parts = {}
        mean: Number = 0.0
        for name, losses in self._losses_of.items():
            total, count = parts[name] = added(losses)
            # On an accelerator the mean over no item is NaN, which is found later.
            mean = mean + total / count
        return Loss(mean * batch.size, batch.size, parts)

    @phase("computing", "step function")
    def _call(self, part: Part, batch: Batch) -> None:
        """Call the function.

        Args:
            part: the samples that it is given.
            batch: of this process.
        """

        def take(name: str, loss: Loss) -> None:
            self._make_update(name, loss, batch)

        part = self.placed(part)
        with self._precision.autocast():
            update = Update(take, self.number, batch.size)
            self._function(self.model, (part.inputs, part.targets), update)

    def _make_update(self, name: str, loss: Loss, batch: Batch) -> None:
        """Make one step of the optimizer of that name.

        Args:
            name: of the optimizer.
            loss: of this process's share.
            batch: of this process.

        Raises:
            InputError: there is no such optimizer, or the replicas make different calls.
            NonFiniteLoss: the total isn't finite.
            LossError: the total depends on no parameter.
            RunError: the loss counted no item.
        """
        if name not in self._parameters_of:
            near = nearest(str(name), self._order)
            raise InputError(f'update("{name}"): there is no such optimizer; {near}')
        trained = [p for p in self._parameters_of[name] if p.requires_grad]
        mine = Loss(0.0, 0)
        if batch.parts[0].size:
            self._refuse_wrong(name, loss, trained)
            mine = self._backward(loss, batch.size, trained) if trained else loss.detached()
        self._agree(self._order.index(name))
        if self.world.size > 1:
            mine = self._sum_over_ranks_of(name, mine)

        is_on_device = self._on_accelerator and isinstance(mine.count, torch.Tensor)
        if not is_on_device and float(mine.count) == 0:
            raise no_items(self.world.step)
        self._losses_of.setdefault(name, []).append(mine)
        self._by_name.active = name
        super()._move_parameters(batch.size, mine.count)
        # Fused optimizers leave versions as they are: a later backward of what was computed before
        # would take the moved weights.
        torch.autograd.graph.increment_version(trained)
        self._clear_gradients()

    def _refuse_wrong(self, name: str, loss: Loss, trained: list[nn.Parameter]) -> None:
        """Refuse a loss that isn't finite, or depends on no parameter."""
        total = loss.total
        if not self._on_accelerator and not math.isfinite(total.item()):
            became = f'update("{name}"): the loss became {total.item()}'
            raise not_finite(became, self.world.step, self.world)
        if trained and not total.requires_grad:
            refuse_counted(loss, f'update("{name}"): ')

    def _move_parameters(self, size: int, count: Number) -> None:
        """Do nothing at the end of the update: the calls of the function have moved them."""

    def _clear_gradients(self) -> None:
        for p in self.trained.values:
            p.grad = None

    # ---- between ranks ---------------------------------------------------------------------------

    def _lent(self, part: Part) -> Part:
        """Give this rank's samples, or those of the first rank that has any."""
        if self.world.size == 1:
            return part
        if part.of >= self.world.size and not self.own_loop:
            return part
        sizes = [size for (size,) in over_ranks(self.world, part.size)]
        if all(sizes):
            return part
        source = next(rank for rank, size in enumerate(sizes) if size)
        mine = part
        if self.world.rank == source:
            inputs, targets = to_device((part.inputs, part.targets), torch.device("cpu"))
            mine = Part(inputs, targets, part.size, part.of)
        lent = self.world.broadcast_object(mine, source)
        return part if part.size else lent

    def _agree(self, mine: int) -> None:
        """Make sure that all ranks make the same call now.

        Args:
            mine: the number of an optimizer, or ``_END``.

        Raises:
            InputError: the ranks make different calls.
        """

        def call_of(code: int) -> str:
            return "ends" if code == _END else f"calls update({self._order[code]!r})"

        refuse_other_calls(self.world, mine, call_of)

    @phase("communicating", "reduce")
    def _sum_over_ranks_of(self, name: str, loss: Loss) -> Loss:
        """Sum the loss, and the gradients of its optimizer, over the ranks."""
        numbers = [self.world.asked_to_stop(), *loss]
        asked, total, count = self._reducer.sum(self._parameters_of[name], numbers)
        self.checks.agree_to_stop(asked)
        return Loss(total, count)

    def _check_sums(self, batch: Batch) -> None:
        """Check that the losses of the function are the sums of those of parts of a batch.

        Raises:
            StrategyError: a loss isn't.
        """
        if not self.sums.is_due(self._updates):
            return
        function = SummedFunction(self.model, self._function, self.number, batch.size)
        self.sums.check(batch, function)


class SummedFunction(Summed):
    """The losses of a step function, which makes no update with them.

    Args:
        model: the model.
        function: the step function.
        step: the number of the step.
        samples: of the global batch.
    """

    def __init__(self, model: nn.Module, function: StepFunction, step: int, samples: int) -> None:
        super().__init__(model, [function, *closed_over(function)])
        self._function = function
        self._step = step
        self._samples = samples

    def __call__(self, piece: Piece) -> Loss:
        """Run the function on a piece."""
        named: dict[str, tuple[Number, Number]] = {}
        sums: list[torch.Tensor] = []
        counts: set[float] = set()

        def take(name: str, loss: Loss) -> None:
            call = f'update("{name}"), call {len(named) + 1}'
            named[call] = (loss.total.detach(), loss.count)
            counts.add(float(loss.count))
            if loss.total.requires_grad:
                sums.append(loss.total)

        batch = clones((piece.inputs, piece.targets))
        self._function(self.model, batch, Update(take, self._step, self._samples))
        count: Number = piece.size
        if len(counts) == 1:
            # One device has the mean over what is counted, which only losses of one count share.
            count = counts.pop()
        total = torch.stack(sums).sum() if sums else torch.zeros(())
        return Loss(total, count, named)
