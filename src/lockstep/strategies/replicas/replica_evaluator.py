"""How ``dp`` evaluates: each replica computes its share of a batch in its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.own_batches import refuse_uncut
from lockstep.model.losses.loss import Loss
from lockstep.parallel import gather
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.update_result import added
from lockstep.tensors.pytree import to_device

if TYPE_CHECKING:
    from lockstep.strategies.dp import DPStep

T = TypeVar("T")


class ReplicaEvaluator(Evaluator):
    """Evaluates a model with a replica on each device, each with a share of the batch."""

    _step: DPStep

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Give outputs, targets and loss of each replica, on the first device."""
        first = self._step.world.device.torch
        found = []
        for outputs, targets, loss in super().results(batch):
            outputs = to_device(outputs, first)
            targets = to_device(targets, first)
            found.append((outputs, targets, loss))
        return found

    def of_each(
        self,
        function: Callable[[nn.Module, Part], T],
        batch: Batch,
    ) -> list[tuple[Part, T]]:
        """Call a function for each replica that has samples of a batch, in its thread.

        Returns:
            The samples, on the device of the replica, and what the function made of them, for each
            of these replicas.
        """
        replicas = self._step.copies
        shares = self._step.scatter(batch)

        def compute(i: int) -> tuple[Part, T]:
            part = shares[i][0]
            model = replicas.all[i].model
            return part, function(model, part)

        busy = [i for i, share in enumerate(shares) if share[0].size]
        if self._step.is_checked:
            replicas.refuse_changes()
        return replicas.run(compute, busy)

    def gathered(self, part: Part) -> tuple[Any, Loss]:
        """Gather outputs on the first device, and add up the losses of all replicas."""
        refuse_uncut(part.inputs, part.targets, part.size)
        batch = Batch([part], part.size, 0, 0)
        outputs = []
        losses = []
        for of_replica, _, loss in self.results(batch):
            outputs.append(of_replica)
            losses.append(loss)
        loss = added(losses, self._step.home)
        if len(outputs) == 1:
            return outputs[0], loss
        return gather(outputs, self._step.world.device), loss
