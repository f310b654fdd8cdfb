"""What can go wrong in an update, and what to do then.

On CPU devices it is found at once. The host reads losses on an accelerator only now and then, many
together, so that it needn't wait in each step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.data import Batch, Part
from lockstep.errors import LockstepError, LossError, NonFiniteLoss, OutOfMemory, RunError
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.activation_checkpointing import not_checkpointable
from lockstep.model.compile import not_compilable
from lockstep.model.inplace_error import inplace_error
from lockstep.model.layer_error import is_of_one_sample
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.nonfinite import why_not_finite
from lockstep.strategies.steps.skipped_updates import NO_ITEMS, not_finite
from lockstep.strategies.steps.update_result import Result, read
from lockstep.tensors.pytree import tensors

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

EXPLAINED = (MemoryError, RuntimeError, ValueError)
"""Errors in an update that may be explained (``torch.OutOfMemoryError`` is a RuntimeError)."""

_CAUSES = {
    "device-side assert triggered": (
        "an index is out of range on the accelerator: a target that is not one of the classes, or "
        'a number beyond the rows of an Embedding; devices="1xcpu" names the layer or the loss'
    ),
    "Found dtype Long but expected": (
        "backward of the loss takes no targets of integers: give targets.float()"
    ),
    "backward through the graph a second time": (
        "what the model or the loss keeps of an earlier batch has a graph: keep state.detach()"
    ),
}
"""By PyTorch's text, what is wrong."""


class UpdateChecks:
    """Finds what went wrong in the updates of a step, and decides which of them are skipped.

    Args:
        step: the step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        has_scaler = step.scaler is not None
        is_fused = getattr(step.optimizer, "_step_supports_amp_scaling", False)
        self._optimizer_skips = is_fused and not has_scaler
        # What accelerators have found since the last check.
        self._results: list[tuple[int, Result]] = []
        self._asked: list[torch.Tensor] = []

    # ---- in an update ----------------------------------------------------------------------------

    def refuse_nonfinite(
        self,
        loss: Loss,
        model: nn.Module,
        part: Part,
        outputs: Any,
        where: str,
        *,
        first: bool,
    ) -> None:
        """Refuse a loss that isn't finite, unless the update will be skipped.

        Args:
            loss: of the local batch.
            model: made the outputs.
            part: the local batch.
            outputs: of the model.
            where: the replica that computed the loss; "" in a process that has one.
            first: whether this process has made no update yet.

        Raises:
            NonFiniteLoss: with what was not finite first.
        """
        if math.isfinite(loss.total.item()) or self._step.skips.takes_nonfinite:
            return
        world = self._step.world
        place = where or f"rank {world.rank} ({world.device})"
        why = why_not_finite(model, part, outputs, first=first)
        raise NonFiniteLoss(
            f"the loss became {loss.total.item()} at step {world.step} on {place}: {why}"
        )

    def skips(self, loss: Loss) -> bool:
        """Decide whether to skip an update, and count and log it then."""
        step = self._step
        if step._on_accelerator and not step.skips.nonfinite:
            on_device = isinstance(loss.count, torch.Tensor)
            if self._optimizer_skips:
                # The optimizer reads the count on the device, so that the host needn't wait.
                found = (loss.count == 0).float() if on_device else None
                step.optimizer.found_inf = found  # type: ignore[attr-defined]
            if on_device:
                return False
        why = None
        if float(loss.count) == 0:
            why = NO_ITEMS
        elif step.skips.nonfinite:
            why = self._why_not_finite(loss)
        if why is None:
            step.skips.in_a_row = 0
            return False
        step.skips.add(why, step.world.step)
        # Otherwise PyTorch's schedulers warn that they were called before the optimizer.
        step.optimizer._opt_called = True  # type: ignore[attr-defined]
        return True

    def _why_not_finite(self, loss: Loss) -> str | None:
        """Tell what isn't finite, on all ranks alike; this waits for an accelerator."""
        step = self._step
        if not math.isfinite(float(loss.total)) or not math.isfinite(float(loss.count)):
            return "the loss became NaN or infinite"
        # (The scaler of fp16 skips gradients that overflow, and halves its scale.)
        if step.scaler is None and not step._gradients_are_finite():
            return "a gradient became NaN or infinite"
        return None

    def explained(
        self,
        error: Exception,
        batch: Batch,
    ) -> LockstepError | None:
        """Explain an error in an update; None for one of the model's own.

        Args:
            error: was raised.
            batch: of the update.
        """
        step = self._step
        world = step.world
        known: LockstepError | None = None
        if step._compile:
            known = not_compilable(error)
        if known is None and step._checkpoints:
            known = not_checkpointable(error)
        if known is not None:
            return known
        if is_out_of_memory(error):
            share = max(part.size for part in batch.parts)
            return OutOfMemory(
                f"out of memory on {world.device} at step {world.step} with a share of {share} "
                f"samples: use a smaller batch_size, or accumulate={2 * step._accumulate}"
            )
        if is_of_one_sample(error):
            # One is of this rank alone under hogwild, the other where a rank of an own loop has
            # none.
            whole = max(batch.size, sum(part.of for part in batch.parts))
            return RunError(
                f"step {world.step}: BatchNorm was given one sample only, of a batch of {whole}: "
                "choose a batch_size, or fewer micro-batches, that leaves no batch of one sample; "
                "sync_batchnorm=True normalizes over the replicas of dp and ddp"
            )
        return self._known(error, batch)

    def _known(
        self,
        error: Exception,
        batch: Batch,
    ) -> LockstepError | None:
        """Explain an error of autograd or of a kernel by its text; None for any other."""
        step = self._step
        for text, cause in _CAUSES.items():
            if text in str(error):
                return RunError(f"step {step.world.step}: {cause}")
        if step._synchronises or step.layout.keeps_shards or step._compile:
            return None  # forward meets other ranks, or has no operators of PyTorch's own

        model = step.models()[0]

        def forward() -> None:
            part = step.placed(step.sums.largest_part(batch))
            step._outputs_and_loss(model, part)

        return inplace_error(error, model, forward)

    # ---- what accelerators find, which the host reads later --------------------------------------

    def agree_to_stop(self, asked: Number) -> None:
        """Note how many ranks were asked to stop.

        Args:
            asked: the same number on all ranks; on an accelerator it is read now and then.
        """
        if isinstance(asked, torch.Tensor):
            self._asked.append(asked)
        else:
            self._step.stopping = asked > 0

    def end(self, result: Result) -> None:
        """On an accelerator, remember an update, and check the last fifty now and then."""
        step = self._step
        host_has_read = result._skipped or step.skips.nonfinite
        if not host_has_read:
            self._results.append((step.world.step, result))
        if step.world.step % 50 == 0:
            self.check()
            asked = self._asked
            self._asked = []
            if asked and bool(torch.stack(asked).any()):
                step.stopping = True

    def check(self) -> None:
        """Raise what was wrong first; this waits for the accelerators.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
        """
        results, self._results = self._results, []
        losses = read([result for _, result in results])
        skips = self._step.skips
        for (step, _), (total, count) in zip(results, losses, strict=True):
            if count == 0 and not self._optimizer_skips:
                raise RunError(
                    f"step {step}: the loss counted 0 items in the batch: are all targets ignored? "
                    'Use nonfinite="skip" or a fused optimizer to skip such updates on an '
                    "accelerator"
                )
            if count == 0:
                skips.add(NO_ITEMS, step)
                continue
            if not math.isfinite(total):
                raise not_finite("the loss became NaN or infinite", step, self._step.world)
            skips.in_a_row = 0


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
            f"{where}the loss depends on no parameter: leave out what comes between the model and "
            "the loss without a gradient, as detach(), .item(), argmax() and no_grad"
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
            "the loss is a constant for a local batch without items, and the other ranks' "
            "backward waits for a backward here",
            fix="return a total that depends on the outputs, as (outputs * 0).sum(), also "
            "without items",
        )
    (output,) = found
    everything = torch.ones((), dtype=torch.bool, device=output.device)
    zero = output.masked_fill(everything, 0).sum()  # NaN times zero would be NaN
    return Loss(loss.total + zero.to(loss.total), loss.count, loss.parts)
