"""Step: what every strategy builds, and the part of an update that is the same for all.

An update is: forward and backward of each micro-batch, the sum of gradients over the devices, the
weighting by count, clipping, the optimizer. A strategy writes the first two (``gradients``); the
rest is here, once.

The weighting, with n the samples of the global batch and (total, count) the loss of a share::

    backward runs on  total / n  every rank knows n before it starts
    gradients are     summed     over micro-batches, replicas and ranks; total and count beside them
    and multiplied by n / count  so that they are those of  sum(totals) / sum(counts)

Where nothing is cut, backward runs on total / count, as that of the mean would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.launch.events import Caveat
from lockstep.launch.memory import reset_peak_memory
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.activation_checkpointing import not_checkpointable
from lockstep.model.compile import compile_models, not_compilable, refuse_written_buffers
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizer import begin_momentum, clip_gradients, gradient_values, may_draw
from lockstep.recipe import Recipe
from lockstep.strategies.steps import update_checks
from lockstep.strategies.steps.calls import EXPLAINED, Calls
from lockstep.strategies.steps.skipped_updates import NO_ITEMS, SkippedUpdates
from lockstep.strategies.steps.update_result import Result, backward_factor, quotient
from lockstep.strategies.sums.batch_sums import BatchSums

_OPTIMIZER = -1
"""The number, instead of a micro-batch's, for the random stream of an optimizer that draws."""


class Step(Calls):
    """One model in training under one strategy.

    ``step(inputs, targets)`` is one update; its arguments are this process's share of the global
    batch (all of it where one process drives all devices).

    Attributes:
        stopping: whether the ranks agreed, in the last update, to save and stop the training.
        last_step: the last update of the training, where that is known.
        sums: checks that batches are the sums of their parts.
        caveats: gives where results differ from those of one device, by the settings of the model
            and the job.
        grad_norm: the norm of all gradients in the last update, before clipping, where it is
            computed; on an accelerator a tensor.
        skips: counts the updates that were skipped.
    """

    _reduces = False
    """Whether PyTorch's reducer sums gradients over the ranks while the next backward runs."""

    _waits_in_backward = False
    """Whether replicas exchange something in backward, so that each has to run backward."""

    timed: Literal["rank", "replica", "device"] = "rank"
    """What a profile times: the process, its replicas on threads, or the devices of its stages."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._clip_norm = job.clip_norm
        self._compile = job.compile
        self._checkpoints = job.activation_checkpointing is not None
        self._by_count = not self.cuts_batch and self.scaler is None
        self.stopping = False
        self.last_step: int | None = None
        self.sums = BatchSums(self, job)
        self.grad_norm: Number | None = None
        # Set in an update that is timed.
        self._began: float | None = None
        self.skips = SkippedUpdates(job, world)
        fused = self.scaler is None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._on_devices = update_checks.DeviceChecks(self.skips, optimizer_skips=fused)
        self.caveats: Callable[[], list[Caveat]] = list

    # ---- one update ------------------------------------------------------------------------------

    def update(self, batch: Batch | None = None) -> Result:
        """Make one update on a batch of the loader, or on what ``backward`` has been given.

        An update whose loss counts no item is skipped. With ``nonfinite="skip"`` an update whose
        loss or gradients aren't finite is skipped too; the host waits for an accelerator then.

        Raises:
            RunError: the loss counted no item in too many batches in a row.
            StrategyError: the model does in forward what this strategy can't reproduce.
            NonFiniteLoss: the loss is NaN or infinite (on accelerators found some steps later, to
                save waiting).
            OutOfMemory: with the share that was too large.
        """
        loss = None
        if batch is None:
            batch, loss = self._given_parts()
        else:
            self._look_at_flags()
            self._begin_update(batch)
        try:
            if loss is None:
                loss = self.gradients(batch)
                self._names_of_parts(loss)  # the ranks agree on them
            skipped = self._is_skipped(loss)
            if not skipped:
                self._move_parameters(batch.size, loss.count)
        except EXPLAINED as error:
            self._explain(error, batch)
            raise
        return self._ended(loss, batch.size, skipped=skipped)

    def _begin_update(self, batch: Batch) -> None:
        """Count the update, and check that its batch is the sum of its parts, where that is due."""
        self.world.step += 1
        self._updates += 1
        self.loss.follow()
        self._train_weights()
        if self._updates == 1:
            self.saved.begin_training()
        if self._cuts_each_batch:
            self._check_sums(batch)
        if self._updates == 1:
            self.prepare(batch)
        self._began = None
        if self.loss_check.is_timed(self._updates):
            self._began = self._time()

    def _check_sums(self, batch: Batch) -> None:
        """Check that a batch is the sum of its parts, in updates that are checked.

        Raises:
            StrategyError: it isn't.
        """
        if self.sums.is_due(self._updates):
            self.sums.check(batch)
            reset_peak_memory(self.world)

    @property
    def _may_synchronise(self) -> bool:
        """Whether ``sync_batchnorm`` could be set, and isn't."""
        return self.replicas > 1 and self.together and not self._synchronises

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known."""
        if self._compile:
            compiler_error = not_compilable(error)
            if compiler_error is not None:
                raise compiler_error from None
        if self._checkpoints:
            checkpoint_error = not_checkpointable(error)
            if checkpoint_error is not None:
                raise checkpoint_error from error
        known = update_checks.explained(
            error,
            batch,
            self.world,
            accumulate=self._accumulate,
            may_synchronise=self._may_synchronise,
        )
        if known is not None:
            raise known from error

    def _ended(self, loss: Loss, size: int, *, skipped: bool = False) -> Result:
        """Log what is due at the end of an update, and make the result."""
        interval_note = None
        if self._began is not None:
            seconds = self._time() - self._began
            replicas = len(self.models())
            interval_note = self.loss_check.interval.timed(self._updates, seconds, replicas)
        self.loss_check.agree(self.world, self._updates, interval_note)
        self.tell_of_loss()
        if self.is_checked and self.world.is_first:
            self.tell_once(self.caveats())
        if self.world.size == 1:
            self.stopping = self.world.asked_to_stop()
        self._began = None  # an evaluation may come now
        result = self._result_of(loss, size)
        result._skipped = skipped
        if not self._on_accelerator:
            return result

        host_has_read = skipped or self.skips.nonfinite
        if not host_has_read:
            self._on_devices.note_result(result, self.world.step)
        if self.world.step % 50 == 0:
            self.check()
            self.stopping = self.stopping or self._on_devices.asked_to_stop()
        return result

    def _result_of(self, loss: Loss, size: int) -> Result:
        """Make the result of an update on ``size`` samples."""
        parts: dict[str, tuple[Number, Number]]
        parts = dict.fromkeys(self._names_of_parts(loss), (0.0, 0))
        parts.update(loss.parts)
        return Result(*loss, size, parts)

    def prepare(self, batch: Batch) -> None:
        """Compile the model before the first update; a strategy that shards the model compiles
        later.
        """
        part = batch.parts[0]
        if batch.shares is not None:
            part = batch.shares[0][0]
        if self._compile and part.size:
            refuse_written_buffers(self.model, self.placed(part).inputs)
        self._compile_models()

    @property
    def is_checked(self) -> bool:
        """Whether what may change is compared in this update: in updates 1, 2, 4, 8, ..., in the
        last, and where parameters were frozen or thawed.
        """
        return (
            is_power_of_two(self._updates)
            or self._updates == self._followed
            or self.world.step == self.last_step
        )

    def _compile_models(self) -> None:
        """Compile the models in place, so that modules keep their names."""
        if self._compile:
            compile_models(self.models(), self._compile)

    def _is_skipped(self, loss: Loss) -> bool:
        """Decide whether to skip this update, and count and log it then."""
        if self._on_accelerator and not self.skips.nonfinite:
            on_device = isinstance(loss.count, torch.Tensor)
            if self._on_devices.optimizer_skips:
                # The optimizer reads the count on the device, so that the host needn't wait.
                found = (loss.count == 0).float() if on_device else None
                self.optimizer.found_inf = found  # type: ignore[attr-defined]
            if on_device:
                return False
        why = self._why_skipped(loss)
        if why is None:
            self.skips.in_a_row = 0
            return False
        self.skips.add(why, self.world.step)
        # Otherwise PyTorch's schedulers warn that they were called before the optimizer.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return True

    def _why_skipped(self, loss: Loss) -> str | None:
        """Give the reason to skip this update, on all ranks alike; this waits for an
        accelerator.
        """
        if float(loss.count) == 0:
            return NO_ITEMS
        if not self.skips.nonfinite:
            return None
        if not math.isfinite(float(loss.total)):
            return "the loss became NaN or infinite"
        # (The scaler of fp16 skips gradients that overflow, and halves its scale.)
        if self.scaler is None and not self._gradients_are_finite():
            return "a gradient became NaN or infinite"
        return None

    def _gradients_are_finite(self) -> bool:
        """Tell whether the gradients of this process are finite; this waits for an accelerator."""
        values = [grad for grad in gradient_values(self._parameters) if grad.numel()]
        return math.isfinite(nn.utils.get_total_norm(values, math.inf))

    def _move_parameters(self, size: int, count: Number) -> None:
        """Weight and clip the gradients, and let the optimizer make its step.

        Args:
            size: the samples of the batch.
            count: the items that the loss counted.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        is_weighted = self._by_count or (not isinstance(count, torch.Tensor) and count == size)
        if not is_weighted:
            self._weight(size, count)
        for observer in self.observers:
            observer.gradients_ready()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self._optimize()

    @phase("computing", "optimizer")
    def _optimize(self) -> None:
        # Parameters may be trained anew, or a person may have taken their state away.
        begin_momentum(self.optimizer)
        if self._stream is not None and may_draw(self.optimizer):
            # The optimizer draws the same on all ranks, however batches are cut.
            stream = self._stream[:2] if self.together else self._stream
            self._seed_all(mixed(*stream, _OPTIMIZER))
        if self.scaler is None:
            self.optimizer.step()
            return
        # Where gradients overflowed, every rank leaves the step out and halves the scale.
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @phase("computing", "weight")
    def _weight(self, size: int, count: Number) -> None:
        """Make gradients of total / size those of total / count."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        factor: Number
        if isinstance(count, torch.Tensor) and self._on_accelerator:
            double = next((grad for grad in grads if grad.dtype == torch.float64), None)
            factor = quotient(size, count, double)
        else:
            factor = size / float(count)
        for device in dict.fromkeys(grad.device for grad in grads):
            on_device = [grad for grad in grads if grad.device == device]
            _scale(on_device, factor, device)

    @phase("computing", "clip")
    def _clip(self, clip_norm: float) -> None:
        """Keep the norm of all gradients together at ``clip_norm`` or less."""
        self.grad_norm = clip_gradients(self._parameters, clip_norm)

    @phase("computing", "forward and loss")
    def _forward_loss(self, model: nn.Module, part: Part, where: str = "") -> Loss:
        """Compute total and count of one micro-batch's share.

        Args:
            model: this process's, or a replica of it.
            part: the share.
            where: names the replica in messages.
        """
        checks = self.loss_check.wants(self._updates)
        with self._precision.autocast():
            outputs = self.forward(model, part)
            loss = self._loss_of(outputs, part, step=self.world.step, checks=checks)
        for observer in self.observers:
            observer.forwarded(where, part, outputs)
        if self._waits and not math.isfinite(loss.total.item()):
            loss = self._not_finite(loss, model, part, outputs, where)
        if not loss.total.requires_grad and self._parameters:
            update_checks.refuse_counted(loss)
            if self._waits_in_backward:
                loss = update_checks.with_graph(loss, outputs)
        return loss

    def _not_finite(
        self, loss: Loss, model: nn.Module, part: Part, outputs: Any, where: str
    ) -> Loss:
        """Refuse a loss that isn't finite, unless the update will be skipped.

        The loss of no item is 0, also where the total is NaN times 0.

        Raises:
            NonFiniteLoss: with what was not finite first.
        """
        if loss.count == 0:
            return Loss(torch.zeros_like(loss.total.detach()), loss.count, loss.parts)
        if self.skips.takes_nonfinite:
            return loss
        is_first = self._updates == self.skips.in_a_row + 1
        raise update_checks.not_finite_loss(
            loss.total, model, part, outputs, self.world, where, first=is_first
        )

    def _divisor(self, count: Number, size: int) -> Number:
        """Give what a part's total is divided by for backward: the count, or the batch's size."""
        return count if self._by_count else size

    @phase("computing", "backward")
    def _add_gradient(self, total: torch.Tensor, divisor: Number) -> None:
        """Add the gradient of ``total / divisor`` to every ``parameter.grad``."""
        if not total.requires_grad:
            return
        factor = backward_factor(total, divisor, waits=not self._on_accelerator)
        if self.scaler is not None:
            total = self.scaler.scale(total)
        self._run_backward(total, factor)

    @observed(lambda observer, step, total, *args: observer.backward(total, sums=step._reduces))
    def _run_backward(
        self, total: torch.Tensor, factor: torch.Tensor, inputs: list[nn.Parameter] | None = None
    ) -> None:
        torch.autograd.backward(total, factor, inputs=inputs)

    @property
    def _waits(self) -> bool:
        """Whether the host may wait for values of this update: on accelerators only in the first."""
        return not self._on_accelerator or self._updates == 1

    def _check_loss(self, outputs: Any, targets: Any, size: int, loss: Loss, step: int) -> None:
        """Check that the loss of a local batch is additive; several threads may call this."""
        is_timed = self._began is not None
        began = self._time() if is_timed else 0.0
        wrong = self.loss_check(outputs, targets, loss, size, step=step, waits=self._waits)
        if wrong is not None:
            self._on_devices.note_loss(wrong, step)
        if is_timed:
            self.loss_check.interval.spent(self._time() - began)

    def _agree_to_stop(self, asked: Number) -> None:
        """Note how many ranks were asked to stop.

        Args:
            asked: the same number on all ranks; on an accelerator it is read now and then.
        """
        if isinstance(asked, torch.Tensor):
            self._on_devices.note_asked(asked)
        else:
            self.stopping = asked > 0

    def check(self) -> None:
        """Raise what accelerators have found wrong in the steps since the last check.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        self._on_devices.check(self.world, self.loss_check)

    def bytes_communicated(self) -> int | None:
        """Give the bytes that a device sends to the others in an update; None if unknown."""
        return None

    def over_ranks(self, loss: Loss) -> Loss:
        """Sum the loss of this rank's results of an epoch over all ranks."""
        return loss


def _scale(grads: list[torch.Tensor], factor: Number, device: torch.device) -> None:
    """Multiply gradients on one device in place."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(device, non_blocking=True)
    if all(grad.layout == torch.strided for grad in grads):
        torch._foreach_mul_(grads, factor)
        return
    for grad in grads:
        grad.mul_(factor)
