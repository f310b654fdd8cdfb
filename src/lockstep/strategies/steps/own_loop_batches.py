"""GivenBatches: what a loop of a person's own gives to a step, as batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data import Batch
from lockstep.data.own_batches import batch_of
from lockstep.errors import InputError
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step


class GivenBatches:
    """Makes batches of the arguments of ``step(...)`` and ``step.backward(...)``.

    Args:
        step: the step.
        job: what is trained.
    """

    def __init__(self, step: Step, job: Recipe) -> None:
        self._step = step
        self._accumulate = job.accumulate
        self._synchronises = job.sync_batchnorm
        # In how many micro-batches the last batch was cut.
        self._microbatches = job.accumulate

    def batch_of(self, inputs: Any, targets: Any) -> Batch:
        """Make a batch of this rank's samples; one of ``lockstep.batches`` is taken as it is.

        Raises:
            InputError: the samples can't be cut, or the loader cuts them otherwise than the step.
        """
        step = self._step
        if isinstance(inputs, Batch):
            if len(inputs.parts) > 1 or self._accumulate == 1:
                self._look_at_microbatches(inputs)
                return inputs
            inputs, targets = inputs
        if self._accumulate > 1 and step.world.size > 1 and self._synchronises:
            step.log_once(self._of_own_microbatches())
        return batch_of(inputs, targets, self._accumulate, step.world, step._refuse_gaps)

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
        self._step._follow_cuts(number)

    def _of_own_microbatches(self) -> Iterator[Caveat]:
        """Note that each rank cuts its local batch, instead of the loader the global batch."""
        step = self._step
        has_norms = any(isinstance(module, _BatchNorm) for module in step.model.modules())
        if has_norms and step.world.is_first:
            yield Caveat(
                "batchnorm",
                "each rank cuts its local batch into micro-batches, so BatchNorm normalizes "
                f"over other samples than single with accumulate={self._accumulate}",
                f"lockstep.batches(..., accumulate={self._accumulate}) cuts the global batch as "
                "single does",
            )
