"""BatchCounts: numbers of each global batch, summed before its loss is computed
(``Job(counts=...)``).

The sum over the ranks runs while forward does, and the loss waits for it
(`lockstep.model.losses.counts`). With the loss's share of the global batch of n samples, a local
batch has the total share * n, and its samples as the count: the weighting is that of other losses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.data import Batch
from lockstep.errors import JobError, StrategyError
from lockstep.model.losses.counts import Counts, Shapes
from lockstep.model.losses.model_loss import model_loss

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step


class BatchCounts:
    """Gives the loss of a step the numbers of each batch.

    Args:
        step: the step; every rank has one.
        function: of the job.

    Raises:
        JobError: the loss takes two arguments.
        StrategyError: the ranks don't meet in an update.
    """

    def __init__(
        self,
        step: Step,
        function: Callable[[Any], Any],
    ) -> None:
        loss = step.loss
        if loss.is_known and loss.loss is not model_loss:
            raise JobError(
                f"counts: {loss.name} takes outputs and targets only: give a function "
                "loss(outputs, targets, counts)"
            )
        if step.world.size > 1 and not step.together:
            raise StrategyError(
                "counts: ranks of hogwild have no global batch in which to count: take ddp"
            )
        self._step = step
        self._loss = loss
        self._function = function
        self._home = step.world.device.torch
        if self._home.type == "mps":  # which has no float64
            self._home = torch.device("cpu")
        self._shapes: Shapes | None = None

    def begin(self, batch: Batch) -> None:
        """Count in a batch, and begin to sum over the ranks; every rank calls this.

        Raises:
            JobError: some samples have other numbers than others.
        """
        shares = batch.shares or [batch.parts]
        parts = [part for share in shares for part in share if part.size]
        found = [self._counts(part.targets, part.size) for part in parts]
        shapes = self._agreed([one.shapes for one in found])
        elements = sum(map(math.prod, shapes.values()))
        sums = torch.zeros(1 + elements, dtype=torch.float64, device=self._home)
        for one in found:
            sums += one.sums
        work = None
        if self._step.world.size > 1:
            work = dist.all_reduce(sums, async_op=True)
        counts = Counts(shapes, sums, work)
        self._loss.counts = counts
        for part in parts:
            part.inputs = counts.given_to(self._step.model, part.inputs)

    def of_whole(
        self,
        pairs: Sequence[tuple[Any, Any]],
        samples: int,
    ) -> list[tuple[Any, Any]]:
        """Take some samples of this process for the whole batch.

        Args:
            pairs: inputs and targets of all of them, and of parts of them.
            samples: how many there are.

        Returns:
            The pairs, with what the model is given beside them.

        Raises:
            JobError: the numbers are no sums over samples, and differences aren't accepted.
        """
        counts = self._counts(pairs[0][1], samples)
        parts = [self._counts(targets, 0) for _, targets in pairs[1:]]
        self._loss.counts = counts
        if not self._step.accepts_differences:
            self._refuse_means(counts, parts)
        model = self._step.model
        return [(counts.given_to(model, inputs), targets) for inputs, targets in pairs]

    def _refuse_means(
        self,
        whole: Counts,
        parts: list[Counts],
    ) -> None:
        """Refuse numbers that aren't sums over samples.

        Args:
            whole: of some samples.
            parts: of parts of them.
        """
        if any(part.shapes != whole.shapes for part in parts):
            return  # which is refused with the batch
        together = sum((part.sums[1:] for part in parts), torch.zeros_like(whole.sums[1:]))
        if not torch.allclose(together, whole.sums[1:]):
            raise JobError(
                f"counts: for {whole.samples:.0f} samples it gives {whole.sums[1:].tolist()}, and "
                f"for two parts of them {together.tolist()} together: return sums over samples"
            )

    def _counts(
        self,
        targets: Any,
        samples: int,
    ) -> Counts:
        return Counts.of(self._function, targets, samples, self._home)

    def _agreed(self, found: list[Shapes]) -> Shapes:
        """Give the names and shapes of the first samples of any rank, which all samples have."""
        if self._shapes is None:
            every = itertools.chain(*self._step.world.gather_objects(found))
            self._shapes = next(every, None)
        agreed = self._shapes or {}
        for shapes in found:
            if shapes != agreed:
                raise JobError(
                    f"counts: some samples have numbers of shapes {shapes}, and others {agreed}: "
                    "return all numbers for any samples, always of one shape, and 0 where there is "
                    "nothing to count"
                )
        return agreed
