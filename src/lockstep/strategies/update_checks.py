"""What can go wrong in an update, and what to do then.

On CPU devices it is found at once. An accelerator notes the first step in which something was wrong, and is asked only
now and then, so that the host doesn't wait for it in each step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.errors import LockstepError, NonFiniteLoss, OutOfMemory, RunError
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.layer_error import is_of_one_sample
from lockstep.model.loss import Number
from lockstep.model.loss_check import LossCheck
from lockstep.model.nonfinite import why_not_finite

_NOT_FINITE, _NO_ITEMS, _NOT_ADDITIVE = "not finite", "no items", "not additive"


class DeviceChecks:
    """Remembers, on each accelerator, the first step in which something was wrong."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, torch.device], torch.Tensor] = {}

    def note_result(self, total: Number, count: Number, step: int) -> None:
        """Look at the total and the count of an update, as far as they are on accelerators."""
        if isinstance(total, torch.Tensor):
            self._note(_NOT_FINITE, ~torch.isfinite(total.detach()), step)
        if isinstance(count, torch.Tensor):
            self._note(_NO_ITEMS, count == 0, step)

    def note_loss(self, wrong: torch.Tensor, step: int) -> None:
        """Look at whether a loss was found not to be additive over samples. Threads may call it."""
        self._note(_NOT_ADDITIVE, wrong, step)

    def _note(self, what: str, wrong: torch.Tensor, step: int) -> None:
        key = what, wrong.device
        first = self._first.get(key)
        if first is None:
            first = torch.zeros((), dtype=torch.int64, device=wrong.device)
        self._first[key] = torch.where((first == 0) & wrong, step, first)

    def check(self, world: World, loss_check: LossCheck) -> None:
        """Raise for what was wrong first; waits for the accelerators.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        found = [(int(step), what) for (what, _), step in self._first.items()]
        step, what = min((one for one in found if one[0]), default=(0, ""))
        if what == _NOT_FINITE:
            raise NonFiniteLoss(
                f"the loss became NaN or infinite at step {step} on rank {world.rank} ({world.device}): "
                "look at that batch, try a smaller learning rate, or clip_norm"
            )
        if what == _NO_ITEMS:
            raise no_items(step)
        if what == _NOT_ADDITIVE:
            loss_check.refuse_late(step)


def no_items(step: int) -> RunError:
    """The error of a batch without an item that counts."""
    return RunError(f"step {step}: the loss counted 0 items in the batch: are all targets ignored?")


def refuse_not_finite(
    total: torch.Tensor, model: nn.Module, part: Part, outputs: Any, world: World, *, where: str, first: bool
) -> None:
    """Look at the loss of a part of a batch, computed by the replica ``where``; this waits for its value.

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

    ``sync_batchnorm`` is only offered where it may be used, and would let a batch norm see more samples.
    """
    if is_out_of_memory(error):
        share = max(part.size for part in batch.parts)
        return OutOfMemory(
            f"out of memory on {world.device} at step {world.step} with a share of {share} samples: "
            f"use a smaller batch_size, or accumulate={2 * accumulate}"
        )
    if is_of_one_sample(error):
        size = sum(part.of for part in batch.parts)
        said = f"step {world.step}: BatchNorm was given one sample only, of a batch of {size}"
        if may_synchronise and max(part.of for part in batch.parts) > 1:
            return RunError(
                f"{said}: sync_batchnorm=True lets it see those of all replicas; or choose another batch_size"
            )
        of = "fewer micro-batches, or " if len(batch.parts) > 1 else ""
        return RunError(f"{said}: choose {of}a batch_size that leaves no batch of one sample")
    return None
