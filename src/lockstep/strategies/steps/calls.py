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
from contextlib import AbstractContextManager
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

_UPDATE = -1
"""What a rank says that calls ``update()``, where others say how many parts they have given."""


class Calls(StepState, ABC):
    """A step as a person calls it.

    Attributes:
        of_own_loop: what whoever writes a loop of their own has to know of the model between
            updates.
        caveats_in_parts: gives where results differ from those of one device where a batch is given
            in parts, or is cut in so many micro-batches.
    """

    of_own_loop: tuple[Caveat, ...] = ()
    _by_hand = False
    caveats_in_parts: Callable[..., list[Caveat]] = lambda *microbatches: []

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._seed, self._synchronises = job.seed, job.sync_batchnorm
        self._updates, self._followed = (
            0,
            1,
        )  # and the update for which parameters were last frozen or thawed
        self._microbatches = job.accumulate  # in which the last batch was cut, or is to be
        self._losses: list[Loss] = []  # of the parts since the last update by hand
        self._samples_given = 0
        self._is_begun = False  # an update by hand
        self._left: list[
            tuple[torch.Tensor | None, int]
        ] = []  # the gradients of its parts so far, and their versions

    def __call__(self, inputs: Any, targets: Any = None) -> Result:
        """One update on this process's share of a global batch.

        Args:
            inputs: what the model takes (a tuple as ``model(*inputs)``, a dict as
                ``model(**inputs)``), or a ``Batch`` of ``lockstep.batches``, which also knows the
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
        """Forward and backward of a part of a batch; after as many as a loop likes comes
        ``update()``.

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
        if not self._by_hand:  # from now on each batch is a part of one
            self._by_hand = True
            self._by_count = False
            self.loss_check = self._new_loss_check()
        self._forget_thrown_away()
        number, samples, self._left = len(self._losses), self._samples_given, []
        self._look_at_flags()
        self._look_at_hooks()
        self._agree(number)
        if not number:
            self.world.announce(self.world.step + 1)
        batch = self._batch_of(inputs, targets)
        # Not in place: a strategy may write the next gradients where these are.
        sums = [
            None if p.grad is None or not number else p.grad * samples for p in self._parameters
        ]
        with (
            own_stream(self.world, mixed(self._seed, number) if number else self._seed),
            self._own_streams_of_parts(len(batch.parts), number),
        ):
            if not self._is_begun:
                self._begin_update(batch)
                self._is_begun = True
            elif number == 1:
                self._look_at_parts(batch)
            with self._explained(batch):
                loss = self._checked_gradients(batch)
        self._losses.append(loss)
        self._samples_given = samples + batch.size
        for p, before in zip(self._parameters, sums, strict=True) if number else ():
            p.grad = _joined(before, p.grad, batch.size, self._samples_given)
        self._left = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]
        return self._result_of(loss, batch.size)

    def _look_at_parts(self, batch: Batch) -> None:
        """Log what differs where a batch is given in parts, as the second one comes."""
        if self.world.is_first:
            self.tell_once(self.caveats_in_parts())
        self._check_sums(batch)

    def _given_parts(self) -> tuple[Batch, Loss]:
        """The sizes and the loss of all parts since the last update; the next part begins another
        one.

        Raises:
            InputError: there is none.
        """
        if not self._losses:
            raise InputError(
                "step.update(): there are no gradients yet: call step.backward(inputs, targets) "
                "before, or "
                "step(inputs, targets), which does both"
            )
        self._look_at_flags()
        self._agree(_UPDATE)
        self._train_weights()  # (an evaluation may have come since the last part)
        loss, size = added(self._losses), self._samples_given
        self._losses, self._samples_given, self._is_begun, self._left = [], 0, False, []
        return Batch([Part(None, None, size, size)], size, 0, 0), loss

    def _forget_thrown_away(self) -> None:
        """Forget the parts whose gradients a loop has thrown away (``optimizer.zero_grad()``),
        as PyTorch does.
        """
        if self._losses and self._are_thrown_away():
            self._losses, self._samples_given, self._left = [], 0, []

    def _are_thrown_away(self) -> bool:
        """Whether every gradient that ``backward`` has left was written since, and is 0 or gone."""
        left = [
            (p.grad, was, version)
            for p, (was, version) in zip(self._parameters, self._left, strict=False)
            if was is not None and was.numel()
        ]
        written = all(grad is not was or was._version != version for grad, was, version in left)
        return (
            bool(left)
            and written
            and not any(grad is not None and bool(grad.any()) for grad, *_ in left)
        )

    def _look_at_hooks(self) -> None:
        """Say what hooks on parameters do where batches are cut; a loop may register them at any
        time.
        """
        on_threads = (
            self.replicas > 1 == self.world.size
        )  # where replicas lack them, which is refused
        if (
            self.world.is_first
            and self.cuts_batch
            and not on_threads
            and any(map(is_hooked, self._held.values()))
        ):
            self.tell_once([PARAMETER_HOOKS])

    def _agree(self, number: int) -> None:
        """Make sure that every rank makes this call now: the part of that number, or the update.

        Raises:
            InputError: one makes another.
        """
        every = [theirs for (theirs,) in over_ranks(self.world, number)]
        if len(set(every)) > 1:
            calls = [
                "update()" if n == _UPDATE else f"backward(...) for the {_nth(n)} time"
                for n in every
            ]
            told = " and ".join(f"rank {rank} calls step.{call}" for rank, call in enumerate(calls))
            raise InputError(
                "every rank has to give step.update() as many parts: after step "
                f"{self.world.step} {told}"
            )

    def _refuse_waiting(self, what: str) -> None:
        """Refuse what would lose gradients that wait for the update.

        Raises:
            InputError: some do.
        """
        self._forget_thrown_away()
        if self._losses:
            raise InputError(
                f"{what}: gradients of {self._samples_given} samples, by step.backward(...), wait "
                "for step.update(): "
                "call that first"
            )

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """As every step's.

        Raises:
            InputError: gradients wait for an update; they would be lost.
        """
        self._refuse_waiting("step.state_dict()")
        return super().state_dict(whole=whole)

    @property
    def cuts_batch(self) -> bool:
        """As every evaluator's; what is given by hand is a part of a batch."""
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
        """See whether the loader cuts batches as the step was told; one of fewer samples has fewer
        parts.

        Raises:
            InputError: it cuts them in another number of micro-batches.
        """
        if (number := len(batch.parts)) == min(self._microbatches, batch.size):
            return
        if self._accumulate > 1:
            raise InputError(
                f"accumulate: this batch has {number} micro-batches, and the step was made with "
                f"{self._accumulate}: "
                "give lockstep.batches and lockstep.parallelize the same number"
            )
        self._microbatches = number
        self.tell_once(self.caveats_in_parts(number) if self.world.is_first else ())

    def _of_own_microbatches(self) -> Iterator[Caveat]:
        """What it changes that each rank cuts its share into micro-batches, instead of the
        loader the global batch.
        """
        if (
            self.world.is_first
            and self._synchronises
            and any(isinstance(m, _BatchNorm) for m in self.model.modules())
        ):
            text = (
                "each rank cuts its share into micro-batches, over which BatchNorm normalizes: "
                "they aren't those of "
            )
            single = f"single with accumulate={self._accumulate}"
            fix = (
                f"lockstep.batches(..., accumulate={self._accumulate}) cuts the global batch as "
                "single does"
            )
            yield Caveat("batchnorm", text + single, fix)

    def _refuse_gaps(self, here: list[bool]) -> None:
        """Called where a rank has no sample and a later one has; a strategy that can't do that
        refuses.
        """
        del here

    # ---- what a step makes of it -----------------------------------------------------------------

    @abstractmethod
    def update(self, batch: Batch | None = None) -> Result:
        """One update on a batch of the loader; without one, on what ``backward`` has been given."""

    @abstractmethod
    def _begin_update(self, batch: Batch) -> None:
        """Before the first gradients of an update."""

    @abstractmethod
    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, in updates that are checked."""

    @abstractmethod
    def _checked_gradients(self, batch: Batch) -> Loss:
        """Leave the gradients of a part of an update in every ``parameter.grad``."""

    @abstractmethod
    def _explained(self, batch: Batch) -> AbstractContextManager[None]:
        """In which an error says what to do."""

    @abstractmethod
    def _result_of(self, loss: Loss, size: int) -> Result:
        """What a person is given."""


def _joined(
    sums: torch.Tensor | None, grad: torch.Tensor | None, size: int, whole: int
) -> torch.Tensor | None:
    """The gradient of total / ``whole``, from the sums before and that of total / ``size`` of
    one more part.
    """
    if grad is None:
        return None if sums is None else sums / whole
    return grad * (size / whole) if sums is None else sums.add(grad, alpha=size) / whole


def _nth(number: int) -> str:
    return ("first", "second", "third")[number] if number < 3 else f"{number + 1}th"
