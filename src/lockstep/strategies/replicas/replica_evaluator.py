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
    _has_computed = False

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Give outputs, targets and loss of each replica, on the first device."""
        first = self._step.world.device.torch
        found = []
        for outputs, targets, loss in super().results(batch):
            found.append((to_device(outputs, first), to_device(targets, first), loss))
        return found

    def of_each(
        self,
        function: Callable[[nn.Module, Part], T],
        batch: Batch,
    ) -> list[tuple[Part, T]]:
        """Call a function for each replica that has samples of a batch, in its thread."""
        replicas = self._step.copies
        parts = [share[0] for share in self._step.scatter(batch)]

        def compute(i: int) -> tuple[Part, T]:
            return parts[i], function(replicas.all[i].model, parts[i])

        if not self._has_computed:
            replicas.refuse_changes()
        found = replicas.run(compute, [i for i, part in enumerate(parts) if part.size])
        if not self._has_computed:
            replicas.note_structure()  # the first forward may have registered hooks, in each
            self._has_computed = True
        return found

    def gathered(self, part: Part) -> tuple[Any, Loss]:
        """Gather outputs on the first device, and add up the losses of all replicas."""
        refuse_uncut(part.inputs, part.targets, part.size)
        results = self.results(Batch([part], part.size, 0, 0))
        outputs = [result[0] for result in results]
        loss = added([result[2] for result in results], self._step.home)
        if len(outputs) == 1:
            return outputs[0], loss
        return gather(outputs, self._step.world.device), loss
