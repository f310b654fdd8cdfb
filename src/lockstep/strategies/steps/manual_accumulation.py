"""ManualAccumulation: ``step.backward(...)``, as often as a loop of a person's own calls it, and
``step.update()``.

Each call of ``backward`` is a part of one global batch, whose size nobody knows before the update.
So after every call ``parameter.grad`` is the gradient of total / samples over the parts so far, and
the update weights it as it does that of any batch::

    part 1    n1 samples    g1                                   gradient of total1 / n1
    part 2    n2 samples    (n1 g1 + n2 g2) / (n1 + n2)
    update                  times (n1 + n2) / (count1 + count2), clip, optimizer

Devices sum their gradients in each call; ``accumulate=`` of a step does it once an update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import InputError, StrategyError
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.strategies.steps.update_checks import EXPLAINED
from lockstep.strategies.steps.update_result import added

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

_UPDATE = -1
"""What a rank sends that calls ``update()``; others send the number of parts they have given."""


class ManualAccumulation:
    """The parts that a loop has given since the last update.

    Args:
        step: the step.

    Attributes:
        is_used: whether ``backward`` was ever called: from then on each batch is a part of one.
        losses: of the parts.
        samples: of the parts together.
        left: the gradients that ``backward`` has left, with their versions.
        why_whole: why a strategy needs whole batches; "" where the strategy takes parts.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.is_used = False
        self.losses: list[Loss] = []
        self.samples = 0
        self.left: list[tuple[torch.Tensor | None, int]] = []
        self.why_whole = ""
        self._has_begun = False

    def refuse_whole(self) -> None:
        """Refuse parts of a batch where the strategy or the loss needs the whole batch.

        Raises:
            StrategyError: the strategy does.
            InputError: the loss does.
        """
        step = self._step
        if self.why_whole:
            raise StrategyError(self.why_whole)
        setting = ""
        if step.whole_batch is not None:
            setting = 'loss_over="batch"'
        elif step.counts is not None:
            setting = "counts="
        if setting:
            raise InputError(
                f"step.backward(...) adds up losses of parts of a batch, and {setting} needs the "
                "whole batch: call step(inputs, targets)"
            )

    def begin_part(self) -> int:
        """Count one more part, before its gradients.

        Returns:
            Its number, from 0.

        Raises:
            InputError: the ranks call ``backward`` unequally often.
        """
        self._forget_thrown_away()
        number = len(self.losses)
        self._agree(number)
        return number

    def add(self, batch: Batch) -> Loss:
        """Compute the gradients of one more part, and add them to those of the others.

        Args:
            batch: the part.
        """
        step = self._step
        whole = self.samples + batch.size
        # New tensors: a strategy may write the next gradients in place.
        before: list[torch.Tensor | None] = []
        if self.losses:
            for p in step.trained.values:
                before.append(None if p.grad is None else p.grad * (self.samples / whole))
        if not self._has_begun:
            step._begin_update(batch)
            self._has_begun = True
        elif len(self.losses) == 1:
            if step.world.is_first:
                step.log_once(step.caveats_in_parts())
            step._check_sums(batch)
        try:
            loss = step.gradients(batch)
            step.part_names.of(loss)  # the ranks agree on them
        except EXPLAINED as error:
            step._explain(error, batch)
            raise
        self.losses.append(loss)
        self.samples = whole
        for p, grad in zip(step.trained.values, before, strict=bool(before)):
            mine = None if p.grad is None else p.grad * (batch.size / whole)
            p.grad = grad if mine is None else mine if grad is None else grad + mine
        self.left = []
        for p in step.trained.values:
            self.left.append((p.grad, -1 if p.grad is None else p.grad._version))
        return loss

    def take(self) -> tuple[Batch, Loss]:
        """Give the size and the loss of all parts since the last update, and forget the parts.

        Raises:
            InputError: there is no part.
        """
        if not self.losses:
            raise InputError(
                "step.update(): there are no gradients yet: call step.backward(inputs, targets) "
                "before, or step(inputs, targets), which does both"
            )
        self._agree(_UPDATE)
        loss = added(self.losses)
        size = self.samples
        self._forget()
        self._has_begun = False
        return Batch([Part(None, None, size, size)], size, 0, 0), loss

    def refuse_waiting(self, what: str) -> None:
        """Refuse what would lose gradients that wait for the update.

        Raises:
            InputError: there are such gradients.
        """
        self._forget_thrown_away()
        if self.losses:
            raise InputError(
                f"{what}: gradients of {self.samples} samples by step.backward(...) are pending: "
                "call step.update() first"
            )

    def _forget(self) -> None:
        self.losses = []
        self.samples = 0
        self.left = []

    def _forget_thrown_away(self) -> None:
        """Forget the parts whose gradients a loop has thrown away (``optimizer.zero_grad()``), as
        PyTorch does: each was written since ``backward`` has left it, and is 0 or gone.
        """
        grads = []
        for p, (was, version) in zip(self._step.trained.values, self.left, strict=False):
            if was is None or not was.numel():
                continue
            if p.grad is was and was._version == version:
                return
            grads.append(p.grad)
        if grads and not any(grad is not None and bool(grad.any()) for grad in grads):
            self._forget()

    def _agree(self, number: int) -> None:
        """Make sure that every rank makes the same call now.

        Args:
            number: of the part, or ``_UPDATE``.

        Raises:
            InputError: the ranks make different calls.
        """

        def call_of(theirs: int) -> str:
            if theirs == _UPDATE:
                return "calls step.update()"
            return f"calls step.backward(...) for part {theirs + 1}"

        refuse_other_calls(self._step.world, number, call_of)


def refuse_other_calls(world: World, mine: int, call_of: Callable[[int], str]) -> None:
    """Make sure that all ranks make the same call now.

    Args:
        world: the ranks.
        mine: the number of the call.
        call_of: describes the call of a number.

    Raises:
        InputError: the ranks make different calls.
    """
    calls = [call_of(theirs) for (theirs,) in over_ranks(world, mine)]
    if len(set(calls)) > 1:
        listed = ", ".join(f"rank {rank} {call}" for rank, call in enumerate(calls))
        raise InputError(
            f"in step {world.step} {listed}: every rank must make the same calls in the same order"
        )
