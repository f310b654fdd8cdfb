"""WholeBatch: a loss over all samples of a global batch, whose outputs are on several devices, or
come one micro-batch after the other (``loss_over="batch"``).

::

    1. outputs of each local batch and micro-batch, without a graph
    2. outputs and targets of the global batch, in its order, on every rank
    3. their loss, and its gradient G with respect to the outputs
    4. each local batch and micro-batch again, and backward from sum(outputs * G)

The gradients of step 4 add up to those of the loss. Step 4 draws the random numbers of step 1, and
finds the buffers as they were.

Source: gradient caching (Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup, 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import LossError, StrategyError
from lockstep.model.losses.loss import Loss
from lockstep.model.snapshot import Snapshot
from lockstep.parallel.gather import gathered
from lockstep.strategies.steps.update_checks import refuse_counted
from lockstep.strategies.steps.update_result import NOTHING
from lockstep.tensors.pytree import described, each, tensors, to_device
from lockstep.tensors.rows import has_rows

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

_FAR = 1 << 40
"""What the samples of one rank are numbered from, times its number."""

_NONE = Loss(0.0, 0)
"""The loss of all local batches but the first."""


class WholeBatch:
    """Computes the loss of a step over the whole batch.

    Args:
        step: the step; every rank has one.

    Raises:
        StrategyError: the ranks don't meet in an update.
    """

    def __init__(self, step: Step) -> None:
        if not step.together:
            raise StrategyError(
                'loss_over="batch": ranks of hogwild never have the outputs of one batch: take ddp'
            )
        self._step = step
        self._loss = step.loss
        self._home = step.world.device.torch
        self._found = _NONE

    def gradients(self, batch: Batch) -> Loss:
        """Leave the gradient of total / size in every ``parameter.grad``, as `Step.gradients` does.

        Where each rank has one local batch, forward runs once, and its loss does the rest.

        Returns:
            The total, the count and the parts of the loss, the same on every rank.

        Raises:
            LossError: outputs or targets have no row for each sample.
        """
        step = self._step
        if self._is_once(batch):
            self._with_loss(self._among_ranks, step.gradients, batch)
            return self._found
        first = step.world.rank * _FAR

        def numbers(start: int, part: Part) -> Tensor:
            return torch.arange(first + start, first + start + part.size)

        pairs: list[Any] = []
        sizes: list[list[int]] = []
        for parts in batch.shares or [batch.parts]:
            sizes.append([part.size for part in parts])
            pairs += [(part.size, part.targets) for part in parts if part.size]
        outputs = self._outputs(_with_targets(batch, numbers))
        mine = self._differentiated(outputs, self._joined("targets", pairs), sizes)

        def gradients(start: int, part: Part) -> list[Tensor]:
            return [gradient[start : start + part.size] for gradient in mine]

        self._with_loss(self._product, step.gradients, _with_targets(batch, gradients))
        return self._found

    def _is_once(self, batch: Batch) -> bool:
        """Return whether each rank has samples, all in one local batch."""
        world = self._step.world
        if world.size == 1 or len(batch.parts) > 1:
            return False
        (fewest,) = min(over_ranks(world, batch.parts[0].size))
        return fewest > 0

    def _among_ranks(self, outputs: Any, targets: Any, size: int) -> Loss:
        """Stand for the loss of the one local batch of this rank."""
        own = self._joined("outputs", [(size, outputs)])
        targets = self._joined("targets", [(size, targets)])
        return self._product(outputs, self._differentiated(own, targets, [[size]]), size)

    def _differentiated(self, outputs: Any, targets: Any, sizes: list[list[int]]) -> list[Tensor]:
        """Compute the loss of the whole batch, and give its gradients with respect to own outputs.

        Args:
            outputs, targets: of this process's samples, in the order of ``_of_all_ranks``.
            sizes: as ``_of_all_ranks`` takes them.

        Returns:
            A gradient for each tensor of floating point.
        """
        (outputs, targets), places, total = self._of_all_ranks((outputs, targets), sizes)
        leaves = each(_leaf, outputs)
        with torch.enable_grad(), self._step._precision.autocast():
            loss = self._loss(leaves, targets, total)
        self._found = loss.detached()
        if not loss.total.requires_grad:
            refuse_counted(loss)
            return [torch.zeros_like(leaf[places]) for leaf in _learned(leaves)]
        learned = _learned(leaves)
        found = torch.autograd.grad(loss.total, learned, allow_unused=True, materialize_grads=True)
        return [gradient[places] for gradient in found]

    def _product(self, outputs: Any, gradients: list[Tensor], size: int) -> Loss:
        """Stand for the loss of a local batch: backward from it gives outputs these gradients."""
        total = torch.zeros((), device=self._home)
        for output, gradient in zip(_learned(outputs), gradients, strict=True):
            total = total + (output * gradient.to(output.device)).sum().to(self._home)
        return Loss(total, size, dict.fromkeys(self._found.parts, NOTHING))

    def results(self, found: Sequence[tuple[Part, Any]]) -> list[tuple[Any, Any, Loss]]:
        """Give the loss of an evaluation batch with its first local batch, and none with the others.

        Args:
            found: each local batch of this process, and its outputs.

        Returns:
            Outputs, targets and loss of each.
        """
        sizes = [[part.size] for part, _ in found]
        outputs = self._joined("outputs", [(part.size, made) for part, made in found])
        targets = self._joined("targets", [(part.size, part.targets) for part, _ in found])
        (outputs, targets), places, total = self._of_all_ranks((outputs, targets), sizes)
        with self._step._precision.autocast():
            loss = self._loss(outputs, targets, total)
        results = [(made, part.targets, _NONE) for part, made in found]
        if results and not places[0]:
            results[0] = (*results[0][:2], loss)
        return results

    def _with_loss(
        self, loss: Callable[..., Loss], compute: Callable[[Batch], Any], batch: Batch
    ) -> None:
        """Compute a batch with another loss than the job's."""
        step = self._step
        step.loss = loss  # type: ignore[assignment]
        try:
            compute(batch)
        finally:
            step.loss = self._loss

    def _outputs(self, batch: Batch) -> Any:
        """Compute the outputs of this process's samples; None without samples.

        Args:
            batch: its targets are the numbers of the samples.
        """
        step = self._step
        found: list[tuple[int, tuple[int, Any]]] = []

        def keep(outputs: Any, numbers: Tensor, size: int) -> Loss:
            found.append((int(numbers[0]), (size, outputs)))
            return Loss(torch.zeros(()), 0)

        kept = []
        for model in step.models():
            accelerators = step.draws.accelerators
            kept.append(Snapshot(model, step._generators(), accelerators, parameters=False))
        with torch.no_grad():
            self._with_loss(keep, step._local_gradients, batch)
        for snapshot in kept:
            snapshot.put_back()

        found.sort(key=operator.itemgetter(0))
        # A rank without samples of a micro-batch may have computed one of another rank.
        own = [pair for number, pair in found if number // _FAR == step.world.rank]
        return self._joined("outputs", own)

    def _joined(self, name: str, pairs: Sequence[tuple[int, Any]]) -> Any:
        """Join nests of rows, in order, on the first device; None where there are none.

        Args:
            name: of the nests, in messages.
            pairs: the number of samples of each nest, and the nest.
        """
        if not pairs:
            return None
        for size, nest in pairs:
            if not all(has_rows(tensor, size) for tensor in tensors(nest)):
                raise LossError(
                    f'{self._loss.name}: loss_over="batch" needs {name} with a row for each '
                    f"sample, and {size} samples have {described(nest)}"
                )
        moved = [to_device(nest, self._home, self._step._precision.whole) for _, nest in pairs]
        return gathered(moved, self._home, says=0)

    def _of_all_ranks(self, nests: Any, sizes: list[list[int]]) -> tuple[Any, Tensor, int]:
        """Give rows of the global batch.

        Args:
            nests: of this process's samples, replica by replica, and micro-batch by micro-batch.
            sizes: how many these are, likewise.

        Returns:
            The nests of all samples, the places of this process's among them, and their number.
        """
        world = self._step.world
        is_empty = not any(map(sum, sizes))
        like = None if is_empty else each(lambda rows: rows[:0].cpu(), nests)
        ranks = world.gather_objects((sizes, like))
        likes = [one for _, one in ranks if one is not None]
        if len(set(map(described, likes))) > 1:
            raise LossError(
                f'{self._loss.name}: loss_over="batch" needs outputs and targets that differ in '
                f"the first dimension only, and ranks have {described(likes)}"
            )
        if is_empty:
            nests = to_device(likes[0], self._home)
        places, total = _places([sizes for sizes, _ in ranks], world.rank)

        def of_all(rows: Tensor) -> Tensor:
            if rows.dtype == torch.bool:
                return of_all(rows.byte()).bool()
            made = rows.new_zeros(total, *rows.shape[1:])
            made[places] = rows.detach()
            return world.all_reduce(made)

        return each(of_all, nests), places, total


def _with_targets(batch: Batch, make: Callable[[int, Part], Any]) -> Batch:
    """Copy a batch with other targets.

    Args:
        batch: of a loader, or of an own loop.
        make: makes targets of a part, and of the number of this process's samples before.
    """
    start = 0
    replicas = []
    for parts in batch.shares or [batch.parts]:
        made = []
        for part in parts:
            targets = make(start, part) if part.size else None
            made.append(dataclasses.replace(part, targets=targets))
            start += part.size
        replicas.append(made)
    if batch.shares is None:
        return dataclasses.replace(batch, parts=replicas[0])
    return dataclasses.replace(batch, shares=replicas)


def _places(ranks: Sequence[list[list[int]]], rank: int) -> tuple[Tensor, int]:
    """Find where the samples of a rank are in the global batch.

    Micro-batches are cut from the global batch first, and local batches from these.

    Args:
        ranks: of each rank the sizes of its parts, by replica and micro-batch.
        rank: the rank.

    Returns:
        The places, and the number of samples of the global batch.
    """
    # The empty ones are of a rank without samples.
    mine = {(-1, -1): torch.arange(0)}
    start = 0
    most = max(len(parts) for replicas in ranks for parts in replicas)
    for number in range(most):
        for other, replicas in enumerate(ranks):
            for i, parts in enumerate(replicas):
                size = parts[number] if number < len(parts) else 0
                if other == rank:
                    mine[i, number] = torch.arange(start, start + size)
                start += size
    return torch.cat([mine[key] for key in sorted(mine)]), start


def _leaf(tensor: Tensor) -> Tensor:
    """Give a leaf with the values of a tensor, which has a gradient if it is of floating point."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _learned(outputs: Any) -> list[Tensor]:
    """List the tensors of floating point among outputs."""
    return [tensor for tensor in tensors(outputs) if tensor.is_floating_point()]
