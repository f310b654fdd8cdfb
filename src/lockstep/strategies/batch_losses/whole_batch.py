"""WholeBatch: a loss over all samples of a global batch, whose outputs are on several devices, or
come one micro-batch after the other (``loss_over="batch"``).

Where all local batches of a process are computed before the first backward, forward runs once. The
first one computes the loss of all outputs, the others wait::

    replica 0 of dp   forward     | loss of all, G | backward from the outputs, with G
    replica 1 of dp   forward | waits              | backward from the outputs, with G

G is the gradient of the loss with respect to the outputs. Ranks also gather the outputs of all
ranks, and each computes the loss. Otherwise (``accumulate``) forward runs twice::

    1. outputs of each local batch and micro-batch, without a graph
    2. outputs and targets of the global batch, in its order, on every rank; their loss, and G
    3. each local batch and micro-batch again, and backward from the outputs, with G

The gradients add up to those of the loss. Step 3 draws the random numbers of step 1, and finds the
buffers as they were.

Source: gradient caching (Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup, 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import LossError, StrategyError
from lockstep.model.losses.loss import Loss
from lockstep.model.snapshot import Snapshot
from lockstep.parallel.gather import gather
from lockstep.pipelining.microbatch import current
from lockstep.pipelining.runner import Runner
from lockstep.strategies.steps.update_checks import refuse_counted
from lockstep.strategies.steps.update_result import NOTHING
from lockstep.strategies.steps.weighting import backward_factor
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import described, each, tensors, to_device
from lockstep.tensors.rows import has_rows

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

_NONE = Loss(0.0, 0)
"""The loss of all local batches but the first."""


class WholeBatch:
    """Computes the loss of a step over the whole batch.

    Args:
        step: the step; every rank has one.

    Attributes:
        runner: computes the micro-batches of a model in stages; None for other models.

    Raises:
        StrategyError: the ranks don't meet in an update.
    """

    runner: Runner | None = None

    def __init__(self, step: Step) -> None:
        if not step.together:
            raise StrategyError(
                'loss_over="batch": ranks of hogwild never have the outputs of one batch: take ddp'
            )
        self._step = step
        self._loss = step.loss
        self._home = step.world.device.torch
        self._found = _NONE
        # Where the samples of this process are in the global batch, and how many that has.
        self._places = torch.arange(0)
        self._samples = 0
        self._targets: Any = None
        # By the place of the first sample: the size and the outputs of a local batch.
        self._kept: dict[int, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        # Done when all outputs of this process are kept.
        self._are_here: Future[None] = Future()
        # Of the loss, with respect to the outputs of all samples.
        self._gradients: Future[list[Tensor]] = Future()

    def gradients(self, batch: Batch) -> Loss:
        """Leave the gradient of total / size in every ``parameter.grad``, as `Step.gradients` does.

        Returns:
            The total, the count and the parts of the loss, the same on every rank.

        Raises:
            LossError: outputs or targets have no row for each sample.
        """
        step = self._step
        self._begin(batch)
        if self._is_once(batch):
            self._with_loss(self._awaited, step.gradients, batch)
            return self._found
        kept = []
        for model in step.models():
            accelerators = step.draws.accelerators
            kept.append(Snapshot(model, step._generators(), accelerators, parameters=False))
        with torch.no_grad():
            self._with_loss(self._keep, step._local_gradients, batch)
        for snapshot in kept:
            snapshot.put_back()
        self._differentiate()
        self._with_loss(self._given, step.gradients, batch)
        return self._found

    def abort(self) -> None:
        """Free the threads that wait, since another one failed."""
        error = StrategyError("stopped, because another local batch failed")
        for future in (self._are_here, self._gradients):
            if not future.done():
                future.set_exception(error)

    def _begin(self, batch: Batch) -> None:
        """Begin an update."""
        self._are_here, self._gradients = Future(), Future()
        self._kept.clear()
        shares = batch.shares or [batch.parts]
        parts = [part for share in shares for part in share if part.size]
        parts.sort(key=lambda part: part.start)
        spans = [torch.arange(part.start, part.start + part.size) for part in parts]
        self._places = torch.cat([torch.arange(0), *spans])
        self._samples = batch.size
        self._targets = self._joined("targets", [(part.size, part.targets) for part in parts])

    def _is_once(self, batch: Batch) -> bool:
        """Return whether each rank has samples, and all outputs before its first backward."""
        world = self._step.world
        if len(batch.parts) == 1:
            return batch.parts[0].of >= world.size
        if self.runner is None:
            return False
        full = [part for part in batch.parts if part.size]
        is_once = self.runner.computes_forwards_first(len(full))
        return min(over_ranks(world, is_once)) == [1]

    def _keep(
        self,
        outputs: Any,
        part: Part,
    ) -> Loss:
        """Keep the outputs of a local batch of this process, instead of a loss."""
        if part.start >= 0:
            self._kept[part.start] = part.size, outputs
        return Loss(torch.zeros((), device=place_of(outputs)), 0)

    def _awaited(
        self,
        outputs: Any,
        part: Part,
    ) -> Loss:
        """Stand for the loss of a local batch, once all of this process are computed."""
        with self._lock:
            self._keep(outputs, part)
            here = sum(size for size, _ in self._kept.values())
            if here == len(self._places):
                self._are_here.set_result(None)
        microbatch = current()
        if microbatch is not None:
            microbatch.end_forward()
        if part.start == self._places[0]:
            self._are_here.result()
            self._differentiate()
        self._gradients.result()
        if microbatch is not None:
            microbatch.turn_back()
        return self._given(outputs, part)

    def _differentiate(self) -> None:
        """Compute the loss of the whole batch, and its gradients with respect to own outputs."""
        pairs = [self._kept[start] for start in sorted(self._kept)]
        self._kept.clear()
        outputs = self._joined("outputs", pairs)
        nests = outputs, self._targets
        outputs, targets = self._of_all_ranks(nests, self._places, self._samples)
        leaves = each(_leaf, outputs)
        learned = _learned(leaves)
        with torch.enable_grad(), self._step._precision.autocast():
            loss = self._loss(leaves, targets, self._samples)
        self._found = loss.detached()
        if loss.total.requires_grad:
            self._gradients.set_result(self._differentiated(loss.total, learned))
        else:
            refuse_counted(loss)
            self._gradients.set_result(list(map(torch.zeros_like, learned)))

    def _differentiated(
        self,
        total: Tensor,
        outputs: list[Tensor],
    ) -> list[Tensor]:
        """Differentiate total / samples, scaled where the step scales, as without a cut."""
        factor = backward_factor(total, self._samples, waits=False)
        if self._step.scaler is not None:
            total = self._step.scaler.scale(total)
        # As any backward, without autocast, within whose context a replica may be.
        with torch.autocast(self._home.type, enabled=False):
            found = torch.autograd.grad(
                total, outputs, factor, allow_unused=True, materialize_grads=True
            )
        return list(found)

    def _given(
        self,
        outputs: Any,
        part: Part,
    ) -> Loss:
        """Stand for the loss of a local batch: backward from it gives outputs their gradients.

        It is on the device of the outputs. From another replica's device, whose thread of autograd
        may wait for this replica's batch norms, backward would never come here.
        """
        total = torch.zeros((), device=place_of(outputs))
        for output, gradient in zip(_learned(outputs), self._gradients.result(), strict=True):
            if part.start >= 0:
                mine = gradient[part.start : part.start + part.size].to(output.device)
            else:
                mine = torch.zeros_like(output)
            zero: Tensor = _GivenGradient.apply(output, mine)  # type: ignore[no-untyped-call]
            total = total + zero.to(total.device)
        return Loss(total, part.size, dict.fromkeys(self._found.parts, NOTHING))

    def results(self, found: Sequence[tuple[Part, Any]]) -> list[tuple[Any, Any, Loss]]:
        """Give the loss of an evaluation batch with its first local batch, and none with the others.

        Args:
            found: each local batch of this process, and its outputs.

        Returns:
            Outputs, targets and loss of each.
        """
        samples = sum(part.size for part, _ in found)
        sizes = [size for (size,) in over_ranks(self._step.world, samples)]
        start = sum(sizes[: self._step.world.rank])
        places = torch.arange(start, start + samples)
        outputs = self._joined("outputs", [(part.size, made) for part, made in found])
        targets = self._joined("targets", [(part.size, part.targets) for part, _ in found])
        outputs, targets = self._of_all_ranks((outputs, targets), places, sum(sizes))
        with self._step._precision.autocast():
            loss = self._loss(outputs, targets, sum(sizes))
        results = [(made, part.targets, _NONE) for part, made in found]
        if results and not start:
            results[0] = (*results[0][:2], loss)
        return results

    def _with_loss(
        self,
        loss: Callable[[Any, Part], Loss],
        compute: Callable[[Batch], Any],
        batch: Batch,
    ) -> None:
        """Compute a batch with another loss than the job's."""
        step = self._step
        step._stands_in = loss
        try:
            compute(batch)
        finally:
            step._stands_in = None

    def _joined(
        self,
        name: str,
        pairs: Sequence[tuple[int, Any]],
    ) -> Any:
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
        return gather(moved, self._home)

    def _of_all_ranks(
        self,
        nests: Any,
        places: Tensor,
        samples: int,
    ) -> Any:
        """Give rows of the global batch.

        Args:
            nests: of this process's samples.
            places: where these are in the global batch.
            samples: of the global batch.
        """
        world = self._step.world
        like = each(_empty, nests) if len(places) else None
        likes = [one for one in world.gather_objects(like) if one is not None]
        if len(set(map(described, likes))) > 1:
            raise LossError(
                f'{self._loss.name}: loss_over="batch" needs outputs and targets that differ in '
                f"the first dimension only, and ranks have {described(likes)}"
            )
        if like is None:
            nests = to_device(likes[0], self._home)

        def of_all(rows: Tensor) -> Tensor:
            if rows.dtype == torch.bool:
                return of_all(rows.byte()).bool()
            made = rows.new_zeros(samples, *rows.shape[1:])
            made[to_device(places, rows.device)] = rows.detach()
            return world.all_reduce(made)

        return each(of_all, nests)


class _GivenGradient(torch.autograd.Function):
    """Zero, whose backward gives outputs a gradient as it is: scaled, and in the outputs' format."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """Keep the gradient."""
        ctx.save_for_backward(gradient)
        dtype = torch.promote_types(output.dtype, torch.float32).to_real()
        return output.new_zeros((), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *of_total: Tensor) -> tuple[Tensor, None]:
        """Give the gradient, in which the factor of the update is."""
        (gradient,) = ctx.saved_tensors
        return gradient, None


def _empty(rows: Tensor) -> Tensor:
    """Give no rows like these, on the CPU."""
    return torch.empty(0, *rows.shape[1:], dtype=rows.dtype)


def _leaf(tensor: Tensor) -> Tensor:
    """Give a leaf with the values of a tensor, which has a gradient unless it has integers."""
    return tensor.detach().requires_grad_(_may_learn(tensor))


def _learned(outputs: Any) -> list[Tensor]:
    """List the tensors among outputs that a loss may have a gradient for."""
    return [tensor for tensor in tensors(outputs) if _may_learn(tensor)]


def _may_learn(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
