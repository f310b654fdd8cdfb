"""What a loop of a person's own calls: ``step(inputs, targets)``, or ``step.backward(...)`` and
``step.update()``.

By hand, each call of ``backward`` is a part of one global batch, whose size nobody knows before the
update. So after every call ``parameter.grad`` is the gradient of total / samples over the parts so
far, and the update weights it as it does that of any batch::

    part 1    n1 samples    g1                                   gradient of total1 / n1
    part 2    n2 samples    (n1 g1 + n2 g2) / (n1 + n2)
    update                  times (n1 + n2) / (count1 + count2), clip, optimizer

Devices sum their gradients in each call; ``accumulate=`` of a step does it once an update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data import Batch, Part, mixed
from lockstep.data.own_batches import batch_of, own_stream
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError
from lockstep.launch.events import Caveat
from lockstep.launch.world import World
from lockstep.model.hooks import PARAMETER_HOOKS, is_hooked
from lockstep.model.losses.loss import Loss
from lockstep.recipe import Recipe
from lockstep.strategies.steps.step_state import StepState
from lockstep.strategies.steps.update_result import Result, added

EXPLAINED = (MemoryError, RuntimeError, ValueError)
"""Errors in an update that may be explained (``torch.OutOfMemoryError`` is a RuntimeError)."""

_UPDATE = -1
"""What a rank sends that calls ``update()``; others send the number of parts they have given."""


class Calls(StepState, ABC):
    """A step as a person calls it.

    Attributes:
        of_own_loop: what the author of an own loop has to know of the model between updates.
        caveats_in_parts: gives where results differ from those of one device where a batch is given
            in parts, or is cut in micro-batches.
    """

    of_own_loop: tuple[Caveat, ...] = ()
    _by_hand = False
    caveats_in_parts: Callable[..., list[Caveat]] = lambda *microbatches: []

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._seed = job.seed
        self._synchronises = job.sync_batchnorm
        self._updates = 0
        # The update for which parameters were last frozen or thawed.
        self._followed = 1
        # In how many micro-batches the last batch was cut.
        self._microbatches = job.accumulate
        # The parts since the last update by hand: their losses and samples, whether the update has
        # begun, and the gradients that ``backward`` has left, with their versions.
        self._losses: list[Loss] = []
        self._samples_given = 0
        self._is_begun = False
        self._left: list[tuple[torch.Tensor | None, int]] = []

    def __call__(self, inputs: Any, targets: Any = None) -> Result:
        """Make one update on this process's share of a global batch.

        Args:
            inputs: what the model takes (a tuple as ``model(*inputs)``, a dict as
                ``model(**inputs)``), or a ``Batch`` of ``lockstep.batches``, which also has the
                size of the global batch.
            targets: what the loss takes beside the outputs.
        """
        self._refuse_waiting("step(...)")
        self._look_at_flags()
        self._look_at_hooks()
        self.world.announce(self.world.step + 1)
        batch = self._batch_of(inputs, targets)
        with own_stream(self.world, self._seed), self._own_streams_of_parts(len(batch.parts)):
            return self.update(batch)

    def backward(self, inputs: Any, targets: Any = None) -> Result:
        """Run forward and backward of a part of a batch; ``update()`` follows the last part.

        All calls since the last update equal one of the step on all their samples together. Until
        the update ``parameter.grad`` is the gradient of total / samples over the parts so far,
        summed over the devices.

        Args:
            inputs, targets: as the step itself takes them.

        Returns:
            The loss of this part.

        Raises:
            InputError: the ranks call it unequally often.
            LossError: the loss isn't additive over samples, so that parts of a batch can't be added
                up.
        """
        if not self._by_hand:
            # From now on each batch is a part of one.
            self._by_hand = True
            self._by_count = False
            self.loss_check = self._new_loss_check()
        self._forget_thrown_away()
        number = len(self._losses)
        samples = self._samples_given
        self._left = []
        self._look_at_flags()
        self._look_at_hooks()
        self._agree(number)
        if number == 0:
            self.world.announce(self.world.step + 1)
        batch = self._batch_of(inputs, targets)

        # New tensors: a strategy may write the next gradients in place.
        sums: list[torch.Tensor | None] = []
        if number:
            sums = [None if p.grad is None else p.grad * samples for p in self._parameters]
        seed = mixed(self._seed, number) if number else self._seed
        with own_stream(self.world, seed), self._own_streams_of_parts(len(batch.parts), number):
            loss = self._gradients_of_part(batch, number)
        self._losses.append(loss)
        self._samples_given = samples + batch.size
        if number:
            for p, before in zip(self._parameters, sums, strict=True):
                p.grad = _joined(before, p.grad, batch.size, self._samples_given)
        for p in self._parameters:
            self._left.append((p.grad, -1 if p.grad is None else p.grad._version))
        return self._result_of(loss, batch.size)

    def _gradients_of_part(self, batch: Batch, number: int) -> Loss:
        """Compute the gradients of one part.

        Args:
            batch: the part.
            number: of the part, from 0.
        """
        if not self._is_begun:
            self._begin_update(batch)
            self._is_begun = True
        elif number == 1:
            self._look_at_parts(batch)
        try:
            loss = self.gradients(batch)
            self._names_of_parts(loss)  # the ranks agree on them
        except EXPLAINED as error:
            self._explain(error, batch)
            raise
        return loss

    def _look_at_parts(self, batch: Batch) -> None:
        """Log what differs where a batch is given in parts, as the second one comes."""
        if self.world.is_first:
            self.tell_once(self.caveats_in_parts())
        self._check_sums(batch)

    def _given_parts(self) -> tuple[Batch, Loss]:
        """Give the size and the loss of all parts since the last update, and forget the parts.

        Raises:
            InputError: there is no part.
        """
        if not self._losses:
            raise InputError(
                "step.update(): there are no gradients yet: call step.backward(inputs, targets) "
                "before, or step(inputs, targets), which does both"
            )
        self._look_at_flags()
        self._agree(_UPDATE)
        self._train_weights()  # an evaluation may have come since the last part
        loss = added(self._losses)
        size = self._samples_given
        self._forget_parts()
        self._is_begun = False
        return Batch([Part(None, None, size, size)], size, 0, 0), loss

    def _forget_parts(self) -> None:
        self._losses = []
        self._samples_given = 0
        self._left = []

    def _forget_thrown_away(self) -> None:
        """Forget the parts whose gradients a loop has thrown away (``optimizer.zero_grad()``),
        as PyTorch does.
        """
        if self._losses and self._are_thrown_away():
            self._forget_parts()

    def _are_thrown_away(self) -> bool:
        """Whether every gradient that ``backward`` has left was written since, and is 0 or gone."""
        grads = []
        for p, (was, version) in zip(self._parameters, self._left, strict=False):
            if was is None or not was.numel():
                continue
            if p.grad is was and was._version == version:
                return False
            grads.append(p.grad)
        return bool(grads) and not any(grad is not None and bool(grad.any()) for grad in grads)

    def _look_at_hooks(self) -> None:
        """Log what hooks on parameters do where batches are cut; a loop may register them at any
        time.
        """
        if not self.world.is_first or not self.cuts_batch:
            return
        if self.replicas > 1 and self.world.size == 1:
            return  # replicas on threads have no hooks, which is refused
        if any(map(is_hooked, self._held.values())):
            self.tell_once([PARAMETER_HOOKS])

    def _agree(self, number: int) -> None:
        """Make sure that every rank makes the same call now.

        Args:
            number: of the part, or ``_UPDATE``.

        Raises:
            InputError: the ranks make different calls.
        """
        numbers = [theirs for (theirs,) in over_ranks(self.world, number)]
        if len(set(numbers)) == 1:
            return
        calls = []
        for rank, theirs in enumerate(numbers):
            call = "update()"
            if theirs != _UPDATE:
                call = f"backward(...) for the {_nth(theirs)} time"
            calls.append(f"rank {rank} calls step.{call}")
        raise InputError(
            "every rank has to give step.update() as many parts: after step "
            f"{self.world.step} {' and '.join(calls)}"
        )

    def _refuse_waiting(self, what: str) -> None:
        """Refuse what would lose gradients that wait for the update.

        Raises:
            InputError: there are such gradients.
        """
        self._forget_thrown_away()
        if self._losses:
            raise InputError(
                f"{what}: gradients of {self._samples_given} samples, by step.backward(...), wait "
                "for step.update(): call that first"
            )

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the state of model and optimizer under the names of the one-device model.

        Args:
            whole: False gives this rank's rows (`RowShard`) of tensors that ranks share out.

        Raises:
            InputError: gradients wait for an update; they would be lost.
        """
        self._refuse_waiting("step.state_dict()")
        return super().state_dict(whole=whole)

    @property
    def cuts_batch(self) -> bool:
        """Whether a loss sees less than the global batch: a part given by hand, for example."""
        return self._by_hand or super().cuts_batch

    def _follow_flags(self, name: str) -> None:
        self._refuse_waiting(f'parameter "{name}" was frozen, or is trained from now on')
        super()._follow_flags(name)
        self._followed = self._updates + 1

    def _batch_of(self, inputs: Any, targets: Any) -> Batch:
        if isinstance(inputs, Batch):
            if len(inputs.parts) > 1 or self._accumulate == 1:
                self._look_at_microbatches(inputs)
                return inputs
            inputs, targets = inputs
        if self._accumulate > 1 and self.world.size > 1:
            self.tell_once(self._of_own_microbatches())
        return batch_of(inputs, targets, self._accumulate, self.world, self._refuse_gaps)

    def _look_at_microbatches(self, batch: Batch) -> None:
        """Check that the loader cuts batches as the step does; small batches have fewer parts.

        Raises:
            InputError: the loader cuts them in another number of micro-batches.
        """
        number = len(batch.parts)
        if number == min(self._microbatches, batch.size):
            return
        if self._accumulate > 1:
            raise InputError(
                f"accumulate: this batch has {number} micro-batches, and the step was made with "
                f"{self._accumulate}: give lockstep.batches and lockstep.parallelize the same "
                "number"
            )
        self._microbatches = number
        self._cuts_each_batch = self.replicas * number > 1
        self._by_count = self._by_count and not self._cuts_each_batch
        self.loss_check = self._new_loss_check()
        if self.world.is_first:
            self.tell_once(self.caveats_in_parts(number))

    def _of_own_microbatches(self) -> Iterator[Caveat]:
        """Note what differs where each rank cuts its share, instead of the loader the global batch
        into micro-batches.
        """
        if not self.world.is_first or not self._synchronises:
            return
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            yield Caveat(
                "batchnorm",
                "each rank cuts its share into micro-batches, over which BatchNorm normalizes: "
                f"they aren't those of single with accumulate={self._accumulate}",
                f"lockstep.batches(..., accumulate={self._accumulate}) cuts the global batch as "
                "single does",
            )

    def _refuse_gaps(self, here: list[bool]) -> None:
        """Refuse that a rank has no sample and a later one has, in strategies that can't take it.

        Args:
            here: whether each rank has a sample.
        """
        del here

    # ---- what a step computes --------------------------------------------------------------------

    @abstractmethod
    def update(self, batch: Batch | None = None) -> Result:
        """Make one update on a batch of the loader, or on what ``backward`` has been given."""

    @abstractmethod
    def gradients(self, batch: Batch) -> Loss:
        """Leave in every ``parameter.grad`` the gradient of total / n over the global batch of n
        samples; where nothing is cut, of total / count.

        A gradient that no device computed is None.

        Returns:
            The total, the count and the parts of the global batch.
        """

    @abstractmethod
    def _begin_update(self, batch: Batch) -> None:
        """Prepare an update, before its first gradients."""

    @abstractmethod
    def _check_sums(self, batch: Batch) -> None:
        """Check that a batch is the sum of its parts, in updates that are checked."""

    @abstractmethod
    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known."""

    @abstractmethod
    def _result_of(self, loss: Loss, size: int) -> Result:
        """Make the result of an update on ``size`` samples."""


def _joined(
    sums: torch.Tensor | None, grad: torch.Tensor | None, size: int, whole: int
) -> torch.Tensor | None:
    """Give the gradient of total / ``whole`` over the parts so far and one more.

    Args:
        sums: the sum of gradients of the parts so far.
        grad: the gradient of total / ``size`` of the new part.
        size: the samples of the new part.
        whole: the samples of all of them.
    """
    if sums is None:
        return None if grad is None else grad * (size / whole)
    if grad is not None:
        sums = sums.add(grad, alpha=size)
    return sums / whole


def _nth(number: int) -> str:
    return ("first", "second", "third")[number] if number < 3 else f"{number + 1}th"
