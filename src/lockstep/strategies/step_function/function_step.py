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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, LossError, NonFiniteLoss, StrategyError, nearest
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.losses.torch_losses import HALF
from lockstep.model.optimizer import sparse_parameters
from lockstep.model.optimizers import Optimizers
from lockstep.recipe import Recipe
from lockstep.strategies.ranks.rank_tensors import FlatGradients
from lockstep.strategies.steps.skipped_updates import no_items
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_checks import EXPLAINED, refuse_counted
from lockstep.strategies.steps.update_result import Result, added
from lockstep.strategies.steps.weighting import backward_factor
from lockstep.strategies.sums.sums_of_pieces import Piece, Summed, Sums
from lockstep.tensors.pytree import clones, to_device
from lockstep.tensors.rows import cut

_END = -1
"""What a rank sends at the end of the function, instead of the number of an optimizer."""

_LENT = 4
"""The number of samples that a rank without one is lent."""


class Update:
    """The argument that the function calls: ``update("generator", total, count)``.

    Attributes:
        step: the number of this step, from 1, the same on every device.
        samples: of the global batch.
    """

    def __init__(self, owner: FunctionStep, samples: int) -> None:
        self._owner = owner
        self.step = owner.number
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
        self._owner.one_update(name, as_sum(name, total, count), self.samples)


class NotedUpdate:
    """Stands for an `Update`, and only notes the losses that it is called with."""

    def __init__(self, owner: FunctionStep, samples: int) -> None:
        self._owner = owner
        self.step = owner.number
        self.samples = samples
        self.losses: list[tuple[str, Loss]] = []

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        """Note a loss."""
        self._owner.named(name)
        self.losses.append((name, as_sum(name, total, count)))


class SummedFunction(Summed):
    """The losses of a step function, which a `NotedUpdate` notes.

    Args:
        function: the step function.
        owner: the step.
        samples: of the global batch.
    """

    def __init__(self, function: Callable[..., None], owner: FunctionStep, samples: int) -> None:
        self.model = owner.model
        closure = getattr(function, "__closure__", None) or ()
        self.holds = [function, *(cell.cell_contents for cell in closure)]
        self._function = function
        self._owner = owner
        self._samples = samples

    def __call__(self, piece: Piece) -> Sums:
        """Run the function on a piece."""
        update = NotedUpdate(self._owner, self._samples)
        self._function(self.model, clones((piece.inputs, piece.targets)), update)
        named: dict[str, tuple[Number, Number]] = {}
        sums: list[torch.Tensor] = []
        for number, (name, (total, count)) in enumerate(update.losses, 1):
            named[f'update("{name}"), call {number}'] = (total.detach(), count)
            if total.requires_grad:
                sums.append(total)
        return Sums(torch.stack(sums).sum() if sums else None, piece.size, named)

    def doubled(self) -> SummedFunction:
        """Give the losses of a model in float64, whose tensors the function takes as they are."""
        return self


class FunctionStep(Step):
    """Calls the function on this process's share; a base class before the step of a strategy."""

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
        self._of_part: dict[str, list[int]] = {}  # filled by ``named``
        self._sums: dict[tuple[int, ...], FlatGradients] = {}
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
        for p in self._parameters:
            p.grad = None
        try:
            self.run_function(batch)
        except EXPLAINED as error:
            self._explain(error, batch)
            raise
        parts = {}
        mean: Number = 0.0
        for name, losses in self._losses_of.items():
            total, count = added(losses)
            parts[name] = (total, count)
            # On an accelerator the mean over no item is NaN, which is found later.
            mean = mean + total / count
        return self._ended(Loss(mean * batch.size, batch.size, parts), batch.size)

    def run_function(self, batch: Batch) -> None:
        """Run the function on this process's share, and meet the other ranks at the end."""
        self._has_samples = bool(batch.parts[0].size)
        part = self._lent(batch.parts[0])
        self.draws.begin_part(0)
        self.call_function(self.model, self.placed(part), batch.size)
        self._agree(_END)

    @phase("computing", "step function")
    def call_function(self, model: nn.Module, part: Part, samples: int) -> None:
        """Run the function on this process's share, which is on its device."""
        with self._precision.autocast():
            self._function(model, (part.inputs, part.targets), Update(self, samples))

    def one_update(self, name: str, loss: Loss, samples: int) -> None:
        """Make the update for which the function has called ``update``."""
        which = self.named(name)
        mine = Loss(0.0, 0)
        if self._has_samples:
            self.backward_into(which, name, loss, samples)
            mine = loss.detached()
        self._agree(self._order.index(name))
        self._move(name, self._over_ranks(name, mine), samples)

    def _check_sums(self, batch: Batch) -> None:
        """Check that the losses of the function are the sums of those of parts of a batch.

        Raises:
            StrategyError: a loss isn't.
        """
        if self.sums.is_due(self._updates):
            self.sums.check(batch, SummedFunction(self._function, self, batch.size))

    def named(self, name: str) -> list[int]:
        """Find the parameters of the optimizer of that name, frozen or not.

        Raises:
            InputError: there is no such optimizer.
        """
        if name not in self._order:
            raise InputError(
                f'update("{name}"): there is no such optimizer; {nearest(str(name), self._order)}'
            )
        if name not in self._of_part:
            # Optimizers may share parameters.
            part = set(map(id, self.model.get_submodule(name).parameters()))
            self._of_part[name] = [i for i, p in enumerate(self._parameters) if id(p) in part]
        return self._of_part[name]

    def moved(self, name: str) -> list[int]:
        """Find the parameters of that optimizer that aren't frozen now.

        Replicas call this once all have come to the same call of ``update``.
        """
        return [i for i in self.named(name) if self._parameters[i].requires_grad]

    @phase("computing", "backward")
    def backward_into(self, which: list[int], name: str, loss: Loss, samples: int) -> None:
        """Add the gradient of total / ``samples``, or total / count, to those of parameters.

        Args:
            which: the parameters.
            name: of their optimizer.
            loss: of this process's share.
            samples: of the global batch.

        Raises:
            NonFiniteLoss: the total isn't finite.
            LossError: the total depends on no parameter.
        """
        inputs = [self._parameters[i] for i in which if self._parameters[i].requires_grad]
        total = loss.total
        if not self._on_accelerator and not math.isfinite(total.item()):
            raise NonFiniteLoss(
                f'update("{name}"): the loss became {total.item()} at step {self.world.step} on '
                f"{self.world.device}"
            )
        if not inputs:
            # That part of the model is frozen now.
            return
        if not total.requires_grad:
            refuse_counted(loss, f'update("{name}"): ')
            return
        divisor = self._divisor(loss.count, samples)
        factor = backward_factor(total, divisor, waits=not self._on_accelerator)
        self._run_backward(total, factor, inputs)

    def _move(self, name: str, loss: Loss, samples: int) -> None:
        """Weight and clip summed gradients, and let the optimizer of that name make its step."""
        waits = not self._on_accelerator or not isinstance(loss.count, torch.Tensor)
        if waits and float(loss.count) == 0:
            raise no_items(self.world.step)
        self._losses_of.setdefault(name, []).append(loss)
        self._by_name.active = name
        self._move_parameters(samples, loss.count)
        # Fused optimizers leave versions as they are: a later backward of what was computed before
        # would take the moved weights.
        torch.autograd.graph.increment_version([self._parameters[i] for i in self.moved(name)])
        for p in self._parameters:
            p.grad = None

    # ---- between ranks ---------------------------------------------------------------------------

    def _lent(self, part: Part) -> Part:
        """Give this rank's samples, or some of the first rank that has any."""
        if self.world.size == 1 or (not self.own_loop and part.of >= self.world.size):
            return part
        sizes = [size for (size,) in over_ranks(self.world, part.size)]
        if all(sizes):
            return part
        source = next(rank for rank, size in enumerate(sizes) if size)
        mine = _some_of(part) if self.world.rank == source else part
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
            call = "ends" if code == _END else f"calls update({self._order[code]!r})"
            calls.append(f"replica {rank} {call}")
        raise InputError(
            f"step function: in step {self.world.step} {', '.join(calls)}: each replica has to "
            "make the same calls, so choose them by update.step, not by the samples of a local "
            "batch, nor by a counter of your own"
        )

    @phase("communicating", "reduce")
    def _over_ranks(self, name: str, loss: Loss) -> Loss:
        """Sum the loss, and the gradients of its optimizer, over the ranks."""
        world = self.world
        if world.size == 1:
            return loss
        numbers = [world.asked_to_stop(), *loss]
        which = tuple(self.moved(name))
        if which:
            if which not in self._sums:
                mine = [self._parameters[i] for i in which]
                self._sums[which] = FlatGradients(mine, 3, sparse_parameters(self.model))
            asked, total, count = self._sums[which].sum_over(world, numbers)
        else:
            # That part of the model is frozen now.
            here = torch.tensor(
                [float(number) for number in numbers],
                dtype=torch.float64,
                device=world.exchange_device,
            )
            asked, total, count = world.all_reduce(here).tolist()
        self.checks.agree_to_stop(asked)
        return Loss(total, count)

    def _follow_flags(self, name: str) -> None:
        super()._follow_flags(name)
        self._of_part = {}
        self._sums = {}

    # ---- its number ------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the update, from 1; in an own loop, without those of other steps."""
        return self._loaded + self._updates if self.own_loop else self.world.step

    def load(self, folder: str | Path) -> None:
        """Take over the checkpoint that ``save`` wrote, and go on counting updates from there."""
        super().load(folder)
        self._loaded = self.world.step - self._updates

    # ---- what other steps do otherwise -----------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Compile nothing: the function is a person's Python code."""

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


def as_sum(name: str, total: Any, count: Any) -> Loss:
    """Make a loss of the arguments of ``update``.

    Raises:
        LossError: the total is no scalar tensor, the count is no number, or there is no count.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        what = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            what = f"of shape {tuple(total.shape)}"
        raise LossError(f'update("{name}"): the loss is {what}, a scalar tensor is expected')
    if count is None:
        raise LossError(
            f'update("{name}"): there is no count, so what a mean is over is unknown: give the '
            f'sum over items, and their number: update("{name}", total, count)'
        )
    is_scalar = isinstance(count, torch.Tensor) and not count.dim() and not count.requires_grad
    if not isinstance(count, int | float) and not is_scalar:
        raise LossError(f'update("{name}"): the count is {count!r}, a number of items is expected')
    return Loss(total.float() if total.dtype in HALF else total, count)


def _some_of(part: Part) -> Part:
    """Give a few samples of a share, to be sent to another rank."""
    size = min(part.size, _LENT)
    inputs, targets = cut((part.inputs, part.targets), 0, size, part.size)
    inputs, targets = to_device((inputs, targets), torch.device("cpu"))
    return Part(inputs, targets, size, part.of)
