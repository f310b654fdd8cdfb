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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, NonFiniteLoss, StrategyError, nearest
from lockstep.job import Job
from lockstep.launch.events import Caveat
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.inspection import NoticedHooks, is_ragged
from lockstep.model.inspection.nonlinear import own_functions
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizer import sparse_parameters
from lockstep.model.optimizers import Optimizers
from lockstep.strategies.rank_tensors import FlatGradients
from lockstep.strategies.step_function.function_probe import as_sum, probe
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_checks import refuse_counted
from lockstep.strategies.steps.update_result import Result, added, backward_factor
from lockstep.tensors.pytree import to_device
from lockstep.tensors.rows import cut

_END = -1
"""What a rank says at the end of the function; others name an optimizer."""

_SOME, _MOST = 4, 8
"""Samples of each other rank, and local batches, at most, on which the function is tried."""


_BENDS = Caveat(
    "autograd function",
    "the step function's backward has hooks on tensors, or autograd functions of your own: one "
    "that isn't linear (it "
    "clamps gradients, say) is given the gradient of total / samples, not of total / count: what "
    "the whole batch "
    "counts is known afterwards only",
    "single keeps the results",
)


class Update:
    """What the function is given to call: ``update("generator", total, count)``.

    Attributes:
        step: the number of this step, from 1; the same on every device, as a counter of the
            function's own isn't.
        samples: of the global batch.
    """

    def __init__(self, owner: FunctionStep, samples: int, replica: int) -> None:
        self._owner, self._replica = owner, replica
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
        self._owner.one_update(name, as_sum(name, total, count), self.samples, self._replica)


class FunctionStep(Step):
    """Calls the function on this process's share. It is put before the step of a strategy."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Job,
        world: World,
        *others: Any,
    ) -> None:
        super().__init__(model, optimizer, job, world, *others)
        assert isinstance(optimizer, Optimizers) and job.step is not None
        self._by_count = (
            not self.cuts_batch and self._scaler is None
        )  # else backward is of total / samples
        self._function = job.step
        self._by_name = optimizer
        self._order = list(optimizer.by_name)
        self._of_part: dict[str, list[int]] = {}  # as ``named`` gives them
        self._sums: dict[tuple[int, ...], FlatGradients] = {}
        self._losses_of: dict[str, list[Loss]] = {}
        self._adds = True  # this rank has samples
        self._loaded = 0  # the updates before this step was made
        self._hooks: NoticedHooks | None = None
        self._may_bend = False  # backward has hooks, or functions of the person's own

    def update(self, batch: Batch | None = None) -> Result:
        """One step: whatever updates the function makes of a batch. The loss is the sum of those
        of all names.
        """
        if batch is None:
            self._refuse_gradients()
        self._look_at_flags()
        self._losses_of = {}
        self.begin_update(batch)
        for p in self._parameters:
            p.grad = None
        with self.explained(batch):
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
        self.begin_part(0)
        self.call_function(self.model, self.placed(part), batch.size)
        self._agree(_END)

    @phase("computing", "step function")
    def call_function(self, model: nn.Module, part: Part, samples: int, replica: int = 0) -> None:
        """Run the function with a replica on its share, which is on its device."""
        looks = self.looks_again and self.cuts_batch and self.world.is_first and not replica
        with self._precision.autocast(), NoticedHooks() if looks else nullcontext() as hooks:
            self._hooks = hooks or self._hooks  # (of the first replica, in whichever thread)
            self._function(model, (part.inputs, part.targets), Update(self, samples, replica))

    def one_update(self, name: str, loss: Loss, samples: int, replica: int) -> None:
        """What a call of ``update`` does."""
        del replica
        which = self.named(name)
        if self._adds:
            self.backward_into(which, name, loss, samples)
        self._agree(self._order.index(name))
        self._move(
            name, self._over_ranks(name, loss.detached() if self._adds else Loss(0.0, 0)), samples
        )

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

    def backward_into(
        self,
        which: list[int],
        name: str,
        loss: Loss,
        samples: int,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        """Add the gradient of total / ``samples``, or total / count, to those of the parameters,
        of one replica.
        """
        parameters = self._parameters if parameters is None else parameters
        inputs = [parameters[i] for i in which if parameters[i].requires_grad]
        total = loss.total
        if not self._on_accelerator and not math.isfinite(value := total.item()):
            raise NonFiniteLoss(
                f'update("{name}"): the loss became {value} at step {self.world.step} on '
                f"{self.world.device}"
            )
        if not inputs:
            return  # that part is frozen now
        if not total.requires_grad:
            refuse_counted(loss, f'update("{name}"): ')
        else:
            if self.looks_again and self._hooks is not None:
                self._may_bend |= self._hooks.found or bool(own_functions(total))
            divisor = self.divisor(loss.count, samples)
            self._run_backward_into(
                total, backward_factor(total, divisor, waits=not self._on_accelerator), inputs
            )

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
        if len(set(codes)) > 1:
            self.refuse_different([self._order[code] if code != _END else "" for code in codes])

    def refuse_different(self, calls: list[str | None]) -> NoReturn:
        """Raise for replicas that make different calls: their names, "" at the end, None without a
        sample.

        Raises:
            InputError: always.
        """
        told = [
            f"replica {i} {f'calls update({name!r})' if name else 'ends'}"
            for i, name in enumerate(calls)
            if name is not None
        ]
        raise InputError(
            f"step function: in step {self.world.step} {', '.join(told)}: each replica has to "
            "make the same calls, so "
            "choose them by update.step, not by the samples of a local batch, nor by a counter of "
            "your own"
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
            self.agree_to_stop(asked)
            return Loss(total, count)
        if which not in self._sums:
            mine = [self._parameters[i] for i in which]
            self._sums[which] = FlatGradients(mine, 3, sparse_parameters(self.model))
        asked, total, count = self._sums[which].sum_over(
            self.world, [self.world.asked_to_stop(), *loss]
        )
        self.agree_to_stop(asked)
        return Loss(total, count)

    def _follow_flags(self, name: str) -> None:
        super()._follow_flags(name)
        self._of_part, self._sums = {}, {}

    def of_weighting(self) -> list[Caveat]:
        """As every step's; of functions backward isn't tried, only looked at."""
        return [_BENDS] if self._may_bend else []

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
        """Look at what the function does with the first batch."""
        if self.last_look:
            self._look(batch)

    def _look(self, batch: Batch) -> None:
        """Look whether the losses of the function are sums over samples, where batches are cut."""
        if not self.cuts_batch:
            return
        shares = self.first_shares(batch)
        if self.world.size > 1:
            every = self.world.gather_objects(_some_of(shares[0]))
            shares = [shares[0], *(self.placed(part) for part in every[1:] if part.size)]
        if self.world.is_first:
            count = min(self.replicas, _MOST)
            self.tell_once(
                probe(
                    self._function, self.model, shares, self.world, self.number, local_batches=count
                )
            )

    def part_names(self, loss: Loss) -> tuple[str, ...]:
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


def _some_of(part: Part) -> Part:
    """A few samples of a share, to be sent to another rank; all where they can't be cut."""
    size = part.size if is_ragged(part.inputs, part.size) else min(part.size, _SOME)
    inputs, targets = to_device(
        cut((part.inputs, part.targets), 0, size, part.size), torch.device("cpu")
    )
    return Part(inputs, targets, size, part.of)
