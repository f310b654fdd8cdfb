"""What can go wrong in an update, and what to do then.

On CPU devices it is found at once. The host reads losses on an accelerator only now and then, many
together, so that it needn't wait in each step. The first step with a loss that isn't additive is
noted on the accelerator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.errors import LockstepError, LossError, NonFiniteLoss, OutOfMemory, RunError
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.layer_error import is_of_one_sample
from lockstep.model.losses.loss import Loss
from lockstep.model.losses.loss_check import LossCheck
from lockstep.model.nonfinite import why_not_finite
from lockstep.strategies.steps.skipped_updates import NO_ITEMS, SkippedUpdates, not_finite
from lockstep.strategies.steps.update_result import Result, read
from lockstep.tensors.pytree import tensors

EXPLAINED = (MemoryError, RuntimeError, ValueError)
"""Errors in an update that may be explained (``torch.OutOfMemoryError`` is a RuntimeError)."""

_NOT_FINITE, _NO_ITEMS, _NOT_ADDITIVE = "not finite", "no items", "not additive"


class DeviceChecks:
    """Keeps the results of updates on accelerators, until it is asked for the first wrong one.

    Args:
        skips: counts the skipped updates.
        optimizer_skips: whether the optimizer itself skips a batch that counts nothing.
    """

    def __init__(self, skips: SkippedUpdates, *, optimizer_skips: bool) -> None:
        self._skips = skips
        self.optimizer_skips = optimizer_skips
        self._results: list[tuple[int, Result]] = []
        self._first: dict[torch.device, torch.Tensor] = {}
        self._asked: list[torch.Tensor] = []

    def note_result(self, result: Result, step: int) -> None:
        """Remember an update."""
        self._results.append((step, result))

    def note_loss(self, wrong: torch.Tensor, step: int) -> None:
        """Note on the device the first step whose loss isn't additive; threads may call this.

        Args:
            wrong: a boolean scalar, whether the loss of this step isn't additive over samples.
            step: its number.
        """
        first = self._first.get(wrong.device)
        if first is None:
            first = torch.zeros((), dtype=torch.int64, device=wrong.device)
        self._first[wrong.device] = torch.where((first == 0) & wrong, step, first)

    def note_asked(self, ranks: torch.Tensor) -> None:
        """Remember how many ranks were asked to stop in an update."""
        self._asked.append(ranks)

    def asked_to_stop(self) -> bool:
        """Whether any rank was asked since the last call; this waits for the accelerators."""
        asked = self._asked
        self._asked = []
        return bool(asked) and bool(torch.stack(asked).any())

    def check(self, world: World, loss_check: LossCheck) -> None:
        """Raise what was wrong first; this waits for the accelerators.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        found = self._found_on_host()
        for first in self._first.values():
            step = int(first)
            if step:
                found.append((step, _NOT_ADDITIVE))
        step, what = min(found, default=(0, ""))
        if what == _NOT_FINITE:
            raise not_finite("the loss became NaN or infinite", step, world)
        if what == _NO_ITEMS:
            raise RunError(
                f"step {step}: the loss counted 0 items in the batch: are all targets ignored? "
                'Use nonfinite="skip" or a fused optimizer to skip such updates on an accelerator'
            )
        if what == _NOT_ADDITIVE:
            raise loss_check.found_later(step)

    def _found_on_host(self) -> list[tuple[int, str]]:
        """Read the results, and count the updates that the optimizer has skipped.

        Returns:
            The steps that were wrong, each with what was wrong.
        """
        steps = [step for step, _ in self._results]
        losses = read([result for _, result in self._results])
        self._results.clear()
        found = []
        for step, (total, count) in zip(steps, losses, strict=True):
            if count == 0 and self.optimizer_skips:
                self._skips.add(NO_ITEMS, step)
                continue
            if count == 0:
                found.append((step, _NO_ITEMS))
            elif not math.isfinite(total):
                found.append((step, _NOT_FINITE))
            self._skips.in_a_row = 0
        return found


def refuse_counted(loss: Loss, where: str = "") -> None:
    """Refuse a loss that depends on no parameter, unless it counts nothing.

    Args:
        loss: depends on no parameter.
        where: begins the message.

    Raises:
        LossError: it counts something.
    """
    if loss.count != 0:
        raise LossError(
            f"{where}the loss depends on no parameter: is the model's output detached, or this "
            "inside of no_grad?"
        )


def with_graph(loss: Loss, outputs: Any) -> Loss:
    """Give a constant loss a graph, with gradients of zero for the model's output.

    Args:
        loss: of a local batch in which nothing counts.
        outputs: of the model.

    Raises:
        LossError: which outputs the loss would read isn't known.
    """
    found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    if len(found) != 1 or not found[0].is_floating_point():
        raise LossError(
            "the loss is a constant for a local batch in which nothing counts, and the backward "
            "of the others waits for one here",
            fix="give a total that is computed from the outputs, as (outputs * 0).sum(), also "
            "where nothing counts",
        )
    (output,) = found
    everything = torch.ones((), dtype=torch.bool, device=output.device)
    zero = output.masked_fill(everything, 0).sum()  # NaN times zero would be NaN
    return Loss(loss.total + zero.to(loss.total), loss.count, loss.parts)


def not_finite_loss(
    total: torch.Tensor,
    model: nn.Module,
    part: Part,
    outputs: Any,
    world: World,
    where: str,
    *,
    first: bool,
) -> NonFiniteLoss:
    """Make the error of a loss that isn't finite, with what was not finite first.

    Args:
        total: of the loss.
        model: made the outputs.
        part: the local batch.
        outputs: of the model.
        world: the ranks.
        where: the replica that computed the loss; "" in a process that has one.
        first: whether nothing was updated yet in this process.
    """
    place = where or f"rank {world.rank} ({world.device})"
    why = why_not_finite(model, part, outputs, first=first)
    return NonFiniteLoss(f"the loss became {total.item()} at step {world.step} on {place}: {why}")


def explained(
    error: BaseException, batch: Batch, world: World, *, accumulate: int, may_synchronise: bool
) -> LockstepError | None:
    """Explain an error in an update; None for one of the model's own.

    Args:
        error: was raised.
        batch: of the update.
        world: the ranks.
        accumulate: the number of micro-batches.
        may_synchronise: whether ``sync_batchnorm`` could be set.
    """
    if is_out_of_memory(error):
        share = max(part.size for part in batch.parts)
        return OutOfMemory(
            f"out of memory on {world.device} at step {world.step} with a share of {share} "
            f"samples: use a smaller batch_size, or accumulate={2 * accumulate}"
        )
    if not is_of_one_sample(error):
        return None
    sizes = [part.of for part in batch.parts]
    what = f"step {world.step}: BatchNorm was given one sample only, of a batch of {sum(sizes)}"
    # It would see more samples only where a micro-batch has more than this one.
    if may_synchronise and max(sizes) > 1:
        return RunError(
            f"{what}: sync_batchnorm=True lets it see those of all replicas; or choose another "
            "batch_size"
        )
    fewer = "fewer micro-batches, or " if len(sizes) > 1 else ""
    return RunError(f"{what}: choose {fewer}a batch_size that leaves no batch of one sample")
