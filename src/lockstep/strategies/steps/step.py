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
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from lockstep.strategies.steps.calls import Calls
from lockstep.strategies.steps.skipped_updates import NO_ITEMS, SkippedUpdates, no_items
from lockstep.strategies.steps.update_result import Result, backward_factor, quotient
from lockstep.strategies.sums.batch_sums import BatchSums

_OPTIMIZER = -1
"""In the place of a micro-batch's number, for the random stream of an optimizer that draws."""


class Step(Calls):
    """One model in training under one strategy.

    ``step(inputs, targets)`` is one update; its arguments are this process's share of the global
    batch (all of it where one process drives all devices).

    Attributes:
        stopping: whether the ranks have agreed, in the last update, that the training is to be
            saved and stopped.
        last_step: the last update of the training, where that is known.
        sums: holds batches to being the sums of their parts.
        caveats: gives where results differ from those of one device, by the settings of the model
            and the job.
        grad_norm: of the last update, before clipping, where that is computed; on an accelerator a
            tensor.
        skips: counts the updates that were skipped.
    """

    _reduces = False
    """Whether PyTorch's reducer sums gradients over the ranks while the next backward runs."""

    _waits_in_backward = False
    """Whether replicas exchange something in backward, so that each has to run one."""

    timed: Literal["rank", "replica", "device"] = "rank"
    """What a profile has times of: the process, its replicas on threads, or the devices of its
    stages.
    """

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
        self._began: float | None = None  # where an update is timed
        self.skips = SkippedUpdates(job, world)
        fused = self.scaler is None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._on_devices = update_checks.DeviceChecks(self.skips, optimizer_skips=fused)
        self.caveats: Callable[[], list[Caveat]] = list

    # ---- one update ------------------------------------------------------------------------------

    def update(self, batch: Batch | None = None) -> Result:
        """One update on a batch of the loader; without one, on what ``backward`` has been given.

        An update whose loss counts no item is skipped. With ``nonfinite="skip"`` an update whose
        loss or gradients aren't finite is skipped too; the host waits for an accelerator then.

        Raises:
            RunError: the loss counted no item in too many batches in a row.
            StrategyError: the model does in forward what can't be kept.
            NonFiniteLoss: the loss is NaN or infinite (on accelerators found some steps later, to
                save waiting).
            OutOfMemory: with the share that was too large.
        """
        batch, loss = self._given_parts() if batch is None else (batch, None)
        if loss is None:
            self._look_at_flags()
            self._begin_update(batch)
        with self._explained(batch):
            loss = loss or self._checked_gradients(batch)
            skipped = self._is_skipped(loss)
            if not skipped:
                self._move_parameters(batch.size, loss.count)
        return self._ended(loss, batch.size, skipped=skipped)

    def _begin_update(self, batch: Batch) -> None:
        """Count the update, and hold its batch to being the sum of its parts, where it is due."""
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
        self._began = self._time() if self.loss_check.is_timed(self._updates) else None

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, in updates that are checked.

        Raises:
            StrategyError: it isn't.
        """
        if self.sums.is_due(self._updates):
            self.sums.check(batch)
            reset_peak_memory(self.world)

    def _checked_gradients(self, batch: Batch) -> Loss:
        """Compute gradients as ``gradients`` does, and agree on the parts of the loss."""
        loss = self.gradients(batch)
        self._names_of_parts(loss)
        return loss

    @property
    def _may_synchronise(self) -> bool:
        """Whether ``sync_batchnorm`` is left out, and could be set."""
        return self.replicas > 1 and self.together and not self._synchronises

    @contextmanager
    def _explained(self, batch: Batch) -> Iterator[None]:
        """Say what an error means, and what to do."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError, ValueError) as error:
            if self._compile and (why := not_compilable(error)) is not None:
                raise why from None
            if self._checkpoints and (said := not_checkpointable(error)) is not None:
                raise said from error
            may = self._may_synchronise
            known = update_checks.explained(
                error, batch, self.world, accumulate=self._accumulate, may_synchronise=may
            )
            if known is None:
                raise
            raise known from error

    def _ended(self, loss: Loss, size: int, *, skipped: bool = False) -> Result:
        """After an update."""
        line = None  # how often the loss is checked from now on
        if self._began is not None:
            seconds = self._time() - self._began
            line = self.loss_check.interval.timed(self._updates, seconds, len(self.models()))
        self.loss_check.agree(self.world, self._updates, line)
        self.tell_of_loss()
        if self.is_checked and self.world.is_first:
            self.tell_once(self.caveats())
        if self.world.size == 1:
            self.stopping = self.world.asked_to_stop()
        result = self._result_of(loss, size)
        result._skipped = skipped
        if self._on_accelerator:
            if not (skipped or self.skips.nonfinite):  # else the host has read it
                self._on_devices.note_result(result, self.world.step)
            if self.world.step % 50 == 0:
                self.check()
                self.stopping = self.stopping or self._on_devices.asked_to_stop()
        return result

    def _result_of(self, loss: Loss, size: int) -> Result:
        """What a person is given for a loss of so many samples."""
        return Result(
            *loss,
            size,
            {name: loss.parts.get(name, (0.0, 0)) for name in self._names_of_parts(loss)},
        )

    def prepare(self, batch: Batch) -> None:
        """Compile the model before the first update. A strategy that shards it does so later."""
        part = batch.parts[0] if batch.shares is None else batch.shares[0][0]
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
        """In place, so that the modules keep their names."""
        if self._compile:
            compile_models(self.models(), self._compile)

    @abstractmethod
    def gradients(self, batch: Batch) -> Loss:
        """Leave in every ``parameter.grad`` the gradient of total / ``divisor`` over the global
        batch.

        A gradient that no device computed is None. Gives the total, the count and the parts of the
        global batch.
        """

    def _is_skipped(self, loss: Loss) -> bool:
        """Decide whether to skip this update, and count and log it then."""
        if self._on_accelerator and not self.skips.nonfinite:
            on_device = isinstance(loss.count, torch.Tensor)
            if self._on_devices.optimizer_skips:  # it reads the count there, so the host doesn't
                found = (loss.count == 0).float() if on_device else None
                self.optimizer.found_inf = found  # type: ignore[attr-defined]
            if on_device:
                return False
        why = self._why_skipped(loss)
        if why is None:
            self.skips.in_a_row = 0
            return False
        self.skips.add(why, self.world.step)
        # Else PyTorch's schedulers warn that they were called before the optimizer.
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
        """With gradients of a batch of so many samples, of which the loss counted so many items."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._weight(size, count)
        for observer in self.observers:
            observer.gradients_ready()
        self.clip()
        self._optimize()

    @phase("computing", "optimizer")
    def _optimize(self) -> None:
        begin_momentum(
            self.optimizer
        )  # of parameters that are trained anew, or whose state a person took away
        if self._stream is not None and may_draw(
            self.optimizer
        ):  # the same on all ranks, however batches are cut
            self._seed_all(
                mixed(*(self._stream[:2] if self.together else self._stream), _OPTIMIZER)
            )
        if self.scaler is None:
            self.optimizer.step()
        else:  # a step whose gradients overflowed is left out, on every rank, and the scale halved
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @phase("computing", "weight")
    def _weight(self, size: int, count: Number) -> None:
        """Make gradients of total / size those of total / count."""
        if isinstance(count, torch.Tensor) and not self._on_accelerator:
            count = float(count)
        if not isinstance(count, torch.Tensor) and count == 0:
            raise no_items(self.world.step)
        if self._by_count or (not isinstance(count, torch.Tensor) and count == size):
            return
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if isinstance(count, torch.Tensor):
            factor: Number = quotient(
                size, count, next((g for g in grads if g.dtype == torch.float64), None)
            )
        else:
            factor = size / count
        for device in dict.fromkeys(grad.device for grad in grads):
            mine = [grad for grad in grads if grad.device == device]
            here = (
                factor.to(device, non_blocking=True) if isinstance(factor, torch.Tensor) else factor
            )
            if all(grad.layout == torch.strided for grad in mine):
                torch._foreach_mul_(mine, here)
            else:
                for grad in mine:
                    grad.mul_(here)

    @phase("computing", "clip")
    def clip(self) -> None:
        """Hold the norm of all gradients together under ``clip_norm``."""
        if self._clip_norm is not None:
            self.grad_norm = clip_gradients(self._parameters, self._clip_norm)

    @phase("computing", "forward and loss")
    def _forward_loss(self, model: nn.Module, part: Part, where: str = "") -> Loss:
        """Total and count of one micro-batch's share under ``model``."""
        checks = self.loss_check.wants(self._updates)
        with self._precision.autocast():
            outputs = self.forward(model, part)
            loss = self._loss_of(outputs, part, step=self.world.step, checks=checks)
        for observer in self.observers:
            observer.forwarded(where, part, outputs)
        if self._waits:
            loss = self._finite(loss, model, part, outputs, where)
        if not loss.total.requires_grad and self._parameters:
            update_checks.refuse_counted(loss)
            return update_checks.with_graph(loss, outputs) if self._waits_in_backward else loss
        return loss

    def _finite(self, loss: Loss, model: nn.Module, part: Part, outputs: Any, where: str) -> Loss:
        """Refuse a loss that isn't finite; that of no item is 0, also where it is NaN times 0."""
        if loss.count == 0 and not math.isfinite(loss.total.item()):
            loss = Loss(torch.zeros_like(loss.total.detach()), loss.count, loss.parts)
        if not self.skips.takes_nonfinite:
            is_first = self._updates == self.skips.in_a_row + 1
            update_checks.refuse_not_finite(
                loss.total, model, part, outputs, self.world, where, first=is_first
            )
        return loss

    def _divisor(self, count: Number, size: int) -> Number:
        """What the total of a part of a batch of so many samples is divided by for its backward."""
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

    @observed(lambda observer, step, total, factor: observer.backward(total, sums=step._reduces))
    def _run_backward(self, total: torch.Tensor, factor: torch.Tensor) -> None:
        torch.autograd.backward(total, factor)

    @property
    def _waits(self) -> bool:
        """Whether values of this update may be waited for: those of an accelerator in the first
        one only.
        """
        return not self._on_accelerator or self._updates == 1

    def _check_loss(self, outputs: Any, targets: Any, size: int, loss: Loss, step: int) -> None:
        """Hold the loss of a local batch to being additive; several threads may."""
        began = None if self._began is None else self._time()
        wrong = self.loss_check(outputs, targets, loss, size, step=step, waits=self._waits)
        if wrong is not None:
            self._on_devices.note_loss(wrong, step)
        if began is not None:
            self.loss_check.interval.spent(self._time() - began)

    def _agree_to_stop(self, asked: Number) -> None:
        """Take note of how many ranks were asked to stop, by a number that is the same on all of
        them.
        """
        if isinstance(asked, torch.Tensor):  # on an accelerator, which is asked now and then
            self._on_devices.note_asked(asked)
        else:
            self.stopping = asked > 0

    def check(self) -> None:
        """Raise for a step in which an accelerator found something wrong, where it has not been
        asked yet.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
            LossError: it is not additive over samples.
        """
        self._on_devices.check(self.world, self.loss_check)

    def bytes_communicated(self) -> int | None:
        """Bytes that a device gives to the others in an update; None where that isn't known."""
        return None

    def over_ranks(self, loss: Loss) -> Loss:
        """The sums over all ranks of what this one's results of an epoch came to."""
        return loss
