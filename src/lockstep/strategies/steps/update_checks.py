"""What can go wrong in an update, and what to do then.

On CPU devices it is found at once. Losses on an accelerator are looked at only now and then,
together, and the first step with one that isn't additive is noted there, so that the host doesn't
wait for it in each step.
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

_NOT_FINITE, _NO_ITEMS, _NOT_ADDITIVE = "not finite", "no items", "not additive"


class DeviceChecks:
    """Remembers what updates on accelerators came to, until it is asked for the first one that was
    wrong.

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
        """Look at whether a loss was found not to be additive over samples. Threads may call it."""
        first = self._first.get(wrong.device)
        if first is None:
            first = torch.zeros((), dtype=torch.int64, device=wrong.device)
        self._first[wrong.device] = torch.where((first == 0) & wrong, step, first)

    def note_asked(self, ranks: torch.Tensor) -> None:
        """Remember how many ranks were asked to stop in an update."""
        self._asked.append(ranks)

    def asked_to_stop(self) -> bool:
        """Whether any was, since this was asked for; waits for the accelerators."""
        asked = self._asked
        self._asked = []
        return bool(asked) and bool(torch.stack(asked).any())

    def check(self, world: World, loss_check: LossCheck) -> None:
        """Raise for what was wrong first; waits for the accelerators.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        found = [(int(step), _NOT_ADDITIVE) for step in self._first.values()]
        for (step, _), (total, count) in zip(
            self._results, read([r for _, r in self._results]), strict=True
        ):
            if count == 0 and self.optimizer_skips:
                self._skips.add(NO_ITEMS, step)
                continue
            if count == 0:
                found.append((step, _NO_ITEMS))
            elif not math.isfinite(total):
                found.append((step, _NOT_FINITE))
            self._skips.in_a_row = 0
        self._results.clear()
        step, what = min((one for one in found if one[0]), default=(0, ""))
        if what == _NOT_FINITE:
            raise not_finite("the loss became NaN or infinite", step, world)
        if what == _NO_ITEMS:
            raise RunError(
                f"step {step}: the loss counted 0 items in the batch: are all targets ignored? "
                'Use nonfinite="skip" or a fused optimizer to skip such updates on an accelerator'
            )
        if what == _NOT_ADDITIVE:
            raise loss_check.found_later(step)


def refuse_counted(loss: Loss, where: str = "") -> None:
    """Look at a loss that depends on no parameter, as it may only where nothing counts; ``where``
    begins the error.

    Raises:
        LossError: something does.
    """
    if loss.count != 0:
        raise LossError(
            f"{where}the loss depends on no parameter: is the model's output detached, or this "
            "inside of no_grad?"
        )


def with_graph(loss: Loss, outputs: Any) -> Loss:
    """A constant loss, of a local batch in which nothing counts, with gradients of zero for the
    model's output.

    Raises:
        LossError: which outputs the loss would read isn't known.
    """
    found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    if len(found) != 1 or not found[0].is_floating_point():
        raise LossError(
            "the loss is a constant for a local batch in which nothing counts, and the backward "
            "of the others waits "
            "for one here",
            fix="give a total that is computed from the outputs, as (outputs * 0).sum(), also "
            "where nothing counts",
        )
    (output,) = found
    everything = torch.ones((), dtype=torch.bool, device=output.device)
    zero = output.masked_fill(everything, 0).sum()  # (NaN times zero wouldn't be 0)
    return Loss(loss.total + zero.to(loss.total), loss.count, loss.parts)


def refuse_not_finite(
    total: torch.Tensor,
    model: nn.Module,
    part: Part,
    outputs: Any,
    world: World,
    where: str,
    *,
    first: bool,
) -> None:
    """Look at the loss of a part of a batch, computed by the replica ``where``; this waits for its
    value.

    Raises:
        NonFiniteLoss: with what was not finite first.
    """
    value = total.item()
    if not math.isfinite(value):
        place = where or f"rank {world.rank} ({world.device})"
        why = why_not_finite(model, part, outputs, first=first)
        raise NonFiniteLoss(f"the loss became {value} at step {world.step} on {place}: {why}")


def explained(
    error: BaseException, batch: Batch, world: World, *, accumulate: int, may_synchronise: bool
) -> LockstepError | None:
    """What an error in an update means, and what to do; None for one of the model's own.

    ``sync_batchnorm`` is only offered where it may be used, and would let a batch norm see more
    samples.
    """
    if is_out_of_memory(error):
        share = max(part.size for part in batch.parts)
        return OutOfMemory(
            f"out of memory on {world.device} at step {world.step} with a share of {share} "
            "samples: "
            f"use a smaller batch_size, or accumulate={2 * accumulate}"
        )
    if is_of_one_sample(error):
        size = sum(part.of for part in batch.parts)
        said = f"step {world.step}: BatchNorm was given one sample only, of a batch of {size}"
        if may_synchronise and max(part.of for part in batch.parts) > 1:
            return RunError(
                f"{said}: sync_batchnorm=True lets it see those of all replicas; or choose "
                "another batch_size"
            )
        of = "fewer micro-batches, or " if len(batch.parts) > 1 else ""
        return RunError(f"{said}: choose {of}a batch_size that leaves no batch of one sample")
    return None
