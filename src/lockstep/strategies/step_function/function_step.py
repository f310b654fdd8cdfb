"""The step of a job with several losses and optimizers: ``Job(step=function)``.

The function is ordinary code, which each replica runs on its share of the global batch::

    def step(models, batch, update):
        images, noise = batch
        drawn = models["generator"](noise)
        update("discriminator", judged(models, images, drawn.detach()), len(images))  # total, count
        update("generator", fooled(models, drawn), len(images))

Each call of ``update`` keeps the law of any update: backward of total / n into the parameters of
that optimizer alone, n being the samples of the global batch; the sum over replicas; times n /
count; clipping; that optimizer's step. So what the function computes afterwards sees the moved
parameters, on every replica alike.

Replicas meet in each call, and have to make the same calls in the same order. A rank without a
sample runs the function on some of another rank's, and adds nothing: so what the function writes,
freezes or counts is alike on all.
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
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.losses.torch_losses import HALF
from lockstep.model.optimizer import sparse_parameters
from lockstep.model.optimizers import Optimizers
from lockstep.recipe import Recipe
from lockstep.strategies.rank_tensors import FlatGradients
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_checks import refuse_counted
from lockstep.strategies.steps.update_result import Result, added, backward_factor
from lockstep.strategies.sums.sums_of_pieces import Piece, Summed, Sums
from lockstep.tensors.pytree import clones, to_device
from lockstep.tensors.rows import cut

_END = -1
"""What a rank reports at the end of the function; else the number of an optimizer."""

_LENT = 4
"""Samples that a rank without one is lent."""


class Update:
    """What the function is given to call: ``update("generator", total, count)``.

    Attributes:
        step: the number of this step, from 1; the same on every device, as a counter of the
            function's own isn't.
        samples: of the global batch.
    """

    def __init__(self, owner: FunctionStep, samples: int) -> None:
        self._owner = owner
        self.step = owner.number
        self.samples = samples

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        """One step of the optimizer of that name.

        Args:
            name: of the optimizer, and of the part of the model that it moves.
            total: the sum of the loss over items, a scalar tensor.
            count: the number of items; a loss without it is refused.

        Raises:
            InputError: there is no such optimizer, or the replicas make other calls.
            LossError: it is no scalar, has no count, or doesn't depend on that part's parameters.
        """
        self._owner.one_update(name, as_sum(name, total, count), self.samples)


class NotedUpdate:
    """Takes note of the losses that ``update`` is given, in the place of an `Update`."""

    def __init__(self, owner: FunctionStep, samples: int) -> None:
        self._owner = owner
        self.step = owner.number
        self.samples = samples
        self.losses: list[tuple[str, Loss]] = []

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        """Take note."""
        self._owner.named(name)
        self.losses.append((name, as_sum(name, total, count)))


class SummedFunction(Summed):
    """The losses of a step function, of which a `NotedUpdate` takes note.

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
        """The same for a model that is in float64."""
        return self


class FunctionStep(Step):
    """Calls the function on this process's share. It is put before the step of a strategy."""

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
        self._of_part: dict[str, list[int]] = {}  # as ``named`` gives them
        self._sums: dict[tuple[int, ...], FlatGradients] = {}
        self._losses_of: dict[str, list[Loss]] = {}
        self._adds = True  # this rank has samples
        self._loaded = 0  # the updates before this step was made

    def update(self, batch: Batch | None = None) -> Result:
        """One step: whatever updates the function makes of a batch. The loss is the sum of those
        of all names.
        """
        if batch is None:
            self._refuse_gradients()
        self._look_at_flags()
        self._losses_of = {}
        self._begin_update(batch)
        for p in self._parameters:
            p.grad = None
        with self._explained(batch):
            self.run_function(batch)
        parts = {name: added(losses) for name, losses in self._losses_of.items()}
        means = [
            total / count for total, count in parts.values()
        ]  # NaN of no item, which an accelerator is asked for
        loss = Loss(
            sum(means) * batch.size, batch.size, {name: (*its,) for name, its in parts.items()}
        )
        return self._ended(loss, batch.size)

    def run_function(self, batch: Batch) -> None:
        """Run it on this process's share."""
        self._adds = bool(batch.parts[0].size)
        part = self._lent(batch.parts[0])
        self._begin_part(0)
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
        if self._adds:
            self.backward_into(which, name, loss, samples)
        self._agree(self._order.index(name))
        mine = loss.detached() if self._adds else Loss(0.0, 0)
        self._move(name, self._over_ranks(name, mine), samples)

    def _check_sums(self, batch: Batch) -> None:
        """Hold the losses of the function to being the sums of those of parts of a batch.

        Raises:
            StrategyError: one isn't.
        """
        if self.sums.is_due(self._updates):
            self.sums.check(batch, SummedFunction(self._function, self, batch.size))

    def named(self, name: str) -> list[int]:
        """Which parameters the optimizer of that name has, frozen or not.

        Raises:
            InputError: there is none.
        """
        if name not in self._order:
            raise InputError(
                f'update("{name}"): there is no such optimizer; {nearest(str(name), self._order)}'
            )
        if name not in self._of_part:
            part = {
                id(p) for p in self.model.get_submodule(name).parameters()
            }  # another one may have some, too
            self._of_part[name] = [i for i, p in enumerate(self._parameters) if id(p) in part]
        return self._of_part[name]

    def moved(self, name: str) -> list[int]:
        """Those that aren't frozen now; on one device, or once all replicas have come to the
        same call.
        """
        return [i for i in self.named(name) if self._parameters[i].requires_grad]

    def backward_into(self, which: list[int], name: str, loss: Loss, samples: int) -> None:
        """Add the gradient of total / ``samples``, or total / count, to those of parameters."""
        inputs = [self._parameters[i] for i in which if self._parameters[i].requires_grad]
        total = loss.total
        if not self._on_accelerator and not math.isfinite(total.item()):
            raise NonFiniteLoss(
                f'update("{name}"): the loss became {total.item()} at step {self.world.step} on '
                f"{self.world.device}"
            )
        if not inputs:
            return  # that part is frozen now
        if not total.requires_grad:
            refuse_counted(loss, f'update("{name}"): ')
            return
        divisor = self._divisor(loss.count, samples)
        factor = backward_factor(total, divisor, waits=not self._on_accelerator)
        self._run_backward_into(total, factor, inputs)

    @phase("computing", "backward")
    @observed(lambda observer, step, total, factor, inputs: observer.backward(total, sums=False))
    def _run_backward_into(
        self, total: torch.Tensor, factor: torch.Tensor, inputs: list[nn.Parameter]
    ) -> None:
        torch.autograd.backward(total, factor, inputs=inputs)

    def _move(self, name: str, loss: Loss, samples: int) -> None:
        """With gradients that are summed: weight and clip them, and let the optimizer of that
        name make its step.
        """
        self._losses_of.setdefault(name, []).append(loss)
        self._by_name.active = name
        self._move_parameters(samples, loss.count)
        # (Fused optimizers don't: a later backward of what was computed before would take the moved
        # weights.)
        torch.autograd.graph.increment_version([self._parameters[i] for i in self.moved(name)])
        for p in self._parameters:
            p.grad = None

    # ---- between ranks ---------------------------------------------------------------------------

    def _lent(self, part: Part) -> Part:
        """This rank's samples; where it has none, some of the first rank's that has."""
        if self.world.size == 1 or (not self.own_loop and part.of >= self.world.size):
            return part
        sizes = [size for (size,) in over_ranks(self.world, part.size)]
        if all(sizes):
            return part
        source = next(rank for rank, size in enumerate(sizes) if size)
        lent = self.world.broadcast_object(
            _some_of(part) if self.world.rank == source else part, source
        )
        return part if part.size else lent

    def _agree(self, mine: int) -> None:
        """Make sure that all ranks call the same now.

        Raises:
            InputError: they call different ones.
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
        """The loss summed over the ranks, and every gradient beside it."""
        if self.world.size == 1:
            return loss
        if not (which := tuple(self.moved(name))):  # that part is frozen now
            numbers = [float(number) for number in (self.world.asked_to_stop(), *loss)]
            asked, total, count = self.world.all_reduce(
                torch.tensor(numbers, dtype=torch.float64, device=self.world.exchange_device)
            ).tolist()
            self._agree_to_stop(asked)
            return Loss(total, count)
        if which not in self._sums:
            mine = [self._parameters[i] for i in which]
            self._sums[which] = FlatGradients(mine, 3, sparse_parameters(self.model))
        asked, total, count = self._sums[which].sum_over(
            self.world, [self.world.asked_to_stop(), *loss]
        )
        self._agree_to_stop(asked)
        return Loss(total, count)

    def _follow_flags(self, name: str) -> None:
        super()._follow_flags(name)
        self._of_part, self._sums = {}, {}

    # ---- its number ------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the update, from 1; in a loop of one's own other steps may be taken between, which
        it doesn't count.
        """
        return self._loaded + self._updates if self.own_loop else self.world.step

    def load(self, folder: str | Path) -> None:
        """As every step's."""
        super().load(folder)
        self._loaded = self.world.step - self._updates

    # ---- what is other than in any step ----------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Compile nothing: the function is Python code of a person's own."""

    def _names_of_parts(self, loss: Loss) -> tuple[str, ...]:
        """Those of the optimizers."""
        return tuple(self._order)

    def gradients(self, batch: Batch) -> Loss:
        """Refused: there are several losses.

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
    """What ``update`` was given, as total and count.

    Raises:
        LossError: the total is no scalar tensor, or the count no number, or missing: what a mean is
            over is unknown.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        is_tensor = isinstance(total, torch.Tensor)
        what = f"of shape {tuple(total.shape)}" if is_tensor else f"a {type(total).__name__}"
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
    """A few samples of a share, to be sent to another rank."""
    size = min(part.size, _LENT)
    inputs, targets = cut((part.inputs, part.targets), 0, size, part.size)
    inputs, targets = to_device((inputs, targets), torch.device("cpu"))
    return Part(inputs, targets, size, part.of)
