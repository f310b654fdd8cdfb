"""Step: what every strategy builds, and the part of an update that is the same for all.

An update is: forward and backward of each micro-batch, the sum of gradients over the devices, the
weighting by count, clipping, the optimizer. A strategy writes the first two (``gradients``); the
rest is here, once.

The weighting is explained in `lockstep.strategies.steps.weighting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.data.own_batches import batch_of, own_stream
from lockstep.errors import InputError, StrategyError
from lockstep.launch.devices import Device
from lockstep.launch.memory import reset_peak_memory
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.compile import compile_models
from lockstep.model.layer_error import explained_call
from lockstep.model.losses.loss import Loss, Number, Totalled, no_loss
from lockstep.model.losses.loss_check import LossCheck
from lockstep.model.optimizers.fused import begin_momentum
from lockstep.model.optimizers.gradients import clip_gradients, gradient_values
from lockstep.model.optimizers.kinds import may_draw
from lockstep.model.precision import Precision
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat, Line
from lockstep.strategies.batch_losses.batch_counts import BatchCounts
from lockstep.strategies.batch_losses.whole_batch import WholeBatch
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.manual_accumulation import ManualAccumulation
from lockstep.strategies.steps.optimizer_modes import OptimizerModes
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.strategies.steps.saved_state import SavedState
from lockstep.strategies.steps.skipped_updates import SkippedUpdates
from lockstep.strategies.steps.trained_parameters import TrainedParameters
from lockstep.strategies.steps.update_checks import (
    EXPLAINED,
    UpdateChecks,
    refuse_counted,
    with_graph,
)
from lockstep.strategies.steps.update_result import NOTHING, PartNames, Result
from lockstep.strategies.steps.update_seeds import Draws
from lockstep.strategies.steps.weighting import backward_factor, weight
from lockstep.strategies.sums.batch_sums import BatchSums, is_power_of_two
from lockstep.tensors.pytree import copied_nest, to_device, versions


class Step:
    """One model in training under one strategy, on this process's devices.

    ``step(inputs, targets)`` is one update; its arguments are this process's share of the global
    batch (all of it where one process drives all devices).

    Attributes:
        model: the model under its one-device names.
        optimizer: the one optimizer of this process.
        world: this process's place among the ranks.
        loss: gives total and count.
        whole_batch: computes a loss over the whole batch; None where it is one over samples.
        counts: gives the loss numbers of the whole batch; None where the job has no ``counts``.
        layout: what each rank has of the parameters.
        trained: the parameters that the optimizer moves.
        modes: puts the optimizer in its mode for training or evaluation.
        draws: the random streams.
        evaluator: computes outputs and losses without an update.
        accumulation: the parts that an own loop gives to ``backward``.
        saved: gives and takes the state of model and optimizer.
        sums: checks that batches are the sums of their parts.
        skips: counts the updates that were skipped.
        checks: finds what went wrong in updates.
        part_names: has the names of the parts of the loss.
        scaler: of the gradients of fp16; None for other formats.
        replicas: how many copies of the model there are over all ranks, each with its local batch.
        together: whether the ranks meet in each update.
        number: how many updates this step has made, those before a resume included.
        stopping: whether the ranks agreed, in the last update, to save and stop the training.
        last_step: the last update of the training, where that is known.
        is_checked: whether what may change is compared in this update: in updates 1, 2, 4, 8, ...,
            in the last, and where parameters were frozen or thawed.
        measures_norm: whether updates compute the norm of the gradients: with ``clip_norm`` each,
            else those whose norm a training logs.
        grad_norm: that norm in the last update, before clipping; on an accelerator a tensor.
        caveats: gives where results differ from those of one device, by the model and the job.
        caveats_in_parts: gives where they differ if a batch is given in parts.
    """

    timed: Literal["rank", "replica", "device"] = "rank"
    """What a profile times: the process, its replicas on threads, or the devices of its stages."""

    own_loop = False
    """Whether a person's own loop calls this step, perhaps on some of the ranks only."""

    of_own_loop: tuple[Caveat, ...] = ()
    """What the author of an own loop has to know of the model between updates."""

    has_own_callbacks = False
    """Whether callbacks of a person's own see the model between updates."""

    _evaluator_kind: type[Evaluator] = Evaluator

    _reduces = False
    """Whether PyTorch's reducer sums gradients over the ranks while the next backward runs."""

    _waits_in_backward = False
    """Whether replicas exchange something in backward, so that each has to run backward."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Recipe, world: World
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.observers = world.observers
        self.together = world.layout.together
        self.replicas = world.layout.local_batches
        self.stopping = False
        self.last_step: int | None = None
        self.is_checked = True
        self.grad_norm: Number | None = None
        self.caveats: Callable[[], list[Caveat]] = list
        self.caveats_in_parts: Callable[[], list[Caveat]] = list

        self._seed = job.seed
        self._accumulate = job.accumulate
        self._clip_norm = math.inf if job.clip_norm is None else job.clip_norm
        self.measures_norm = job.clip_norm is not None
        self._compile = job.compile
        self._checkpoints = job.activation_checkpointing is not None
        self._synchronises = job.sync_batchnorm
        self.accepts_differences = job.accept_differences
        self._channels_last = job.channels_last
        caches = not job.compile or len(world.devices) == 1
        self._precision = Precision(job.precision, world, caches=caches)
        self.scaler = self._precision.scaler
        dtype = self._precision.whole
        place = world.devices[-1].torch
        self.loss = Totalled(no_loss if job.loss is None else job.loss, dtype, place)
        self._on_accelerator = not world.device.is_slot
        self._converts = self._on_accelerator or dtype is not None or self._channels_last

        self.layout = ParameterLayout(model, optimizer)
        self.modes = OptimizerModes(self)
        self.draws = Draws(world)
        self.evaluator = self._evaluator_kind(self)
        self.accumulation = ManualAccumulation(self)
        self.saved = SavedState(self)
        self.sums = BatchSums(self, job)
        self.skips = SkippedUpdates(job, world)
        self.checks = UpdateChecks(self)

        # Each global batch is cut, among replicas or in micro-batches.
        self._cuts_each_batch = self.replicas * self._accumulate > 1
        self._stands_in: Callable[[Any, Part], Loss] | None = None  # for the loss
        self.whole_batch = WholeBatch(self) if job.loss_over == "batch" else None
        self.counts = None if job.counts is None else BatchCounts(self, job.counts)
        self._by_count = not self.cuts_batch and self.scaler is None
        self.loss_check = LossCheck(
            self.loss,
            cuts=self.cuts_batch and self.whole_batch is None,
            accepts=job.accept_differences,
            every=job.check_every,
        )
        self.number = 0
        self._updates = 0
        # The update for which parameters were last frozen or thawed.
        self._followed = 1
        self._noted: set[Caveat | str] = set()
        self.part_names = PartNames(world, self.loss)

        # A step function may train frozen parameters within an update.
        with_frozen = job.step is not None
        self.trained = TrainedParameters(
            model, optimizer, self._own_parameters(), with_frozen=with_frozen
        )

    # ---- what a person's own loop calls ----------------------------------------------------------

    def __call__(self, inputs: Any, targets: Any = None) -> Result:
        """Make one update on this process's share of a global batch.

        Args:
            inputs: what the model takes (a tuple as ``model(*inputs)``, a dict as
                ``model(**inputs)``), or a ``Batch`` of ``lockstep.batches``, which also has the
                size of the global batch.
            targets: what the loss takes beside the outputs.
        """
        self.accumulation.refuse_waiting("step(...)")
        self._look_at_flags()  # before the ranks meet over the batch
        self.world.announce(self.world.step + 1)
        batch = self._batch_of(inputs, targets)
        parts = len(batch.parts)
        with own_stream(self.world, self._seed), self.draws.own_streams_of_parts(parts):
            return self.update(batch)

    def backward(self, inputs: Any, targets: Any = None) -> Result:
        """Run forward and backward of a part of a batch; ``update()`` follows the last part.

        All calls since the last update equal one of the step on all their samples together. Until
        the update ``parameter.grad`` is the gradient of total / samples over the parts so far,
        summed over the devices.

        Args:
            inputs, targets: as the step itself takes them.

        Returns:
            The loss of this part.

        Raises:
            InputError: the ranks call it unequally often, or the loss needs the whole batch.
            LossError: the loss isn't additive over samples: parts of a batch can't be added up.
        """
        self.accumulation.refuse_whole()
        if not self.accumulation.is_used:
            self.accumulation.is_used = True
            self._by_count = False
            self.loss_check.is_used = not self.loss.is_known
        self._look_at_flags()
        number = self.accumulation.begin_part()
        if number == 0:
            self.world.announce(self.world.step + 1)
        batch = self._batch_of(inputs, targets)
        parts = len(batch.parts)
        seed = mixed(self._seed, number) if number else self._seed
        with own_stream(self.world, seed), self.draws.own_streams_of_parts(parts, number):
            loss = self.accumulation.add(batch)
        of_parts = dict.fromkeys(self.part_names.of(loss), NOTHING)
        return Result(*loss, batch.size, of_parts | loss.parts)

    def _batch_of(self, inputs: Any, targets: Any) -> Batch:
        """Make a batch of this rank's samples; one of ``lockstep.batches`` is taken as it is.

        Raises:
            InputError: the samples can't be cut, or the loader cuts them otherwise than the step.
        """
        if isinstance(inputs, Batch):
            number = len(inputs.parts)
            if number == min(self._accumulate, inputs.size):  # small batches have fewer
                return inputs
            if number > 1:
                raise InputError(
                    f"accumulate: this batch has {number} micro-batches, and the step was made "
                    f"with {self._accumulate}: give lockstep.batches and lockstep.parallelize the "
                    "same number"
                )
            inputs, targets = inputs
        return batch_of(inputs, targets, self._accumulate, self.world, self._refuse_gaps)

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
        self._look_at_flags()
        if batch is None:
            batch, loss = self.accumulation.take()
            self.modes.train()  # an evaluation may have come since the last part
        else:
            self._begin_update(batch)
        try:
            if loss is None:
                if self.whole_batch is not None and self._cuts_each_batch:
                    loss = self.whole_batch.gradients(batch)
                else:
                    loss = self.gradients(batch)
            parts = dict.fromkeys(self.part_names.of(loss), NOTHING)  # the ranks agree on names
            skipped = self.checks.skips(loss)
            if not skipped:
                self._move_parameters(batch.size, loss.count)
        except EXPLAINED as error:
            self._explain(error, batch)
            raise
        result = Result(*loss, batch.size, parts | loss.parts, skipped=skipped)
        self._end(result)
        return result

    def _begin_update(self, batch: Batch) -> None:
        """Count the update, and check that its batch is the sum of its parts, where that is due."""
        self.world.step += 1
        self.number += 1
        self._updates += 1
        self.grad_norm = None
        self.is_checked = (
            is_power_of_two(self._updates)
            or self._updates == self._followed
            or self.world.step == self.last_step
        )
        self.loss.follow()
        if self.modes.optimizers:
            self.modes.train()
        if self._updates == 1:
            self.saved.begin_training()
        if self._cuts_each_batch:
            self._check_sums(batch)
        if self._updates == 1:
            self._compile_models()
        if self.counts is not None:
            self.counts.begin(batch)

    def gradients(self, batch: Batch) -> Loss:
        """Leave in every ``parameter.grad`` the gradient of total / n over the global batch of n
        samples; where nothing is cut, of total / count.

        A gradient that no device computed is None. Where ranks meet in an update, they also sum how
        many of them were asked to stop, for ``checks.agree_to_stop``.

        Returns:
            The total, the count and the parts of the global batch.
        """
        raise NotImplementedError

    def _local_gradients(self, batch: Batch) -> Loss:
        """Leave the gradients of this process's samples, which ``gradients`` sums; give their loss."""
        return self.gradients(batch)

    def _gradients_are_finite(self) -> bool:
        """Tell whether the gradients of this process are finite; this waits for an accelerator."""
        values = [grad for grad in gradient_values(self.trained.values) if grad.numel()]
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
        if self.measures_norm:
            self._clip(self._clip_norm)
        self._optimize()

    @phase("computing", "weight")
    def _weight(self, size: int, count: Number) -> None:
        """Make gradients of total / size those of total / count."""
        weight(self.trained.values, size, count, waits=not self._on_accelerator)

    @phase("computing", "clip")
    def _clip(self, clip_norm: float) -> None:
        """Keep the norm of all gradients together at ``clip_norm`` or less."""
        self.grad_norm = clip_gradients(self.trained.values, clip_norm)

    @phase("computing", "optimizer")
    def _optimize(self) -> None:
        # A parameter may be trained for the first time, or a person may have taken its state away.
        if self.is_checked or self.own_loop or self.has_own_callbacks:
            begin_momentum(self.optimizer)
        if may_draw(self.optimizer):
            # The optimizer draws the same on all ranks, however batches are cut.
            self.draws.begin_optimizer(alike=self.together)
        if self.scaler is None:
            self.optimizer.step()
            return
        # Where gradients overflowed, every rank leaves the step out and halves the scale.
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _end(self, result: Result) -> None:
        """Log what is due at the end of an update."""
        if self.loss_check.notes:
            self.log_loss_notes()
        if self.is_checked and self.world.is_first:
            self.log_once([*self.sums.notes, *self.caveats()])
        if self.world.size == 1:
            self.stopping = self.world.asked_to_stop()
        if self._on_accelerator:
            self.checks.end(result)

    # ---- forward and backward of one micro-batch -------------------------------------------------

    def placed(self, part: Part, device: Device | None = None) -> Part:
        """Give the part in the job's number format and layout, on a device.

        Args:
            part: of a batch.
            device: None puts inputs on this process's first device, and targets on its last one.
        """
        if not self._converts:
            return part
        first = device or self.world.devices[0]
        last = device or self.world.devices[-1]
        inputs = to_device(
            part.inputs, first.torch, self._precision.whole, channels_last=self._channels_last
        )
        targets = to_device(part.targets, last.torch, self._precision.whole)
        return Part(inputs, targets, part.size, part.of, part.samples, part.start)

    @phase("computing", "forward and loss")
    def _forward_loss(self, model: nn.Module, part: Part, where: str = "") -> Loss:
        """Compute total and count of one micro-batch's share.

        Args:
            model: this process's, or a replica of it.
            part: the share.
            where: names the replica in messages.
        """
        checks = self.loss_check.wants(self._updates)
        outputs, loss = self._outputs_and_loss(model, part, checks=checks)
        if not torch.is_grad_enabled():
            return loss
        for observer in self.observers:
            observer.forwarded(where, part, outputs)
        if self._waits:
            is_first = self._updates == self.skips.in_a_row + 1
            self.checks.refuse_nonfinite(loss, model, part, outputs, where, first=is_first)
        if self.trained.values and not loss.total.requires_grad:
            refuse_counted(loss)
            if self._waits_in_backward:
                loss = with_graph(loss, outputs)
        return loss

    def _outputs_and_loss(
        self, model: nn.Module, part: Part, *, checks: bool = False
    ) -> tuple[Any, Loss]:
        """Compute outputs, total, count and parts of the loss, and check that it is additive.

        A loss that writes to its arguments isn't checked.

        Args:
            model: this process's, or a replica of it.
            part: on the model's device.
            checks: whether to check the loss.
        """
        with self._precision.autocast():
            outputs = explained_call(model, part.inputs)
            if checks:
                given = copied_nest((outputs, part.targets))  # the loss may change lists
                before = versions(given)
            if self._stands_in is None:
                loss = self.loss(outputs, part.targets, part.size)
            else:
                loss = self._stands_in(outputs, part)
            if checks and versions(given) == before:
                self.loss_check(*given, loss, part.size, step=self.world.step)
        return outputs, loss

    def _backward(self, loss: Loss, size: int, inputs: list[nn.Parameter] | None = None) -> Loss:
        """Add the gradient of a part of a batch of ``size`` samples; give its loss without graph.

        Args:
            loss: of the part.
            size: the samples of the batch.
            inputs: the parameters that get a gradient; None for all.
        """
        if loss.total.requires_grad:
            self._add_gradient(loss.total, loss.count if self._by_count else size, inputs)
        return loss.detached()

    @phase("computing", "backward")
    @observed(lambda observer, step, total, *args: observer.backward(total, sums=step._reduces))
    def _add_gradient(
        self, total: torch.Tensor, divisor: Number, inputs: list[nn.Parameter] | None = None
    ) -> None:
        """Add the gradient of ``total / divisor`` to every ``parameter.grad``."""
        factor = backward_factor(total, divisor, waits=not self._on_accelerator)
        if self.scaler is not None:
            total = self.scaler.scale(total)
        torch.autograd.backward(total, factor, inputs=inputs)

    @property
    def _waits(self) -> bool:
        """Whether the host may wait for values of this update: on accelerators only in the first."""
        return not self._on_accelerator or self._updates == 1

    # ---- what is checked -------------------------------------------------------------------------

    def _check_sums(self, batch: Batch) -> None:
        """Check that a batch is the sum of its parts, in updates that are checked.

        Raises:
            StrategyError: it isn't.
        """
        if self.sums.is_due(self._updates):
            self.sums.check(batch)
            reset_peak_memory(self.world)

    @property
    def cuts_batch(self) -> bool:
        """Whether a loss sees less than the global batch, so that it must be additive over
        samples.
        """
        return self.accumulation.is_used or self._cuts_each_batch

    def _explain(self, error: Exception, batch: Batch) -> None:
        """Raise an error that explains ``error``, where its cause is known."""
        known = self.checks.explained(error, batch)
        if known is not None:
            raise known from error

    def check(self) -> None:
        """Raise what accelerators have found wrong in the steps since the last check.

        Raises:
            NonFiniteLoss: the loss was not finite.
            RunError: it counted no item.
        """
        self.checks.check()

    # ---- what is trained -------------------------------------------------------------------------

    def _look_at_flags(self) -> None:
        """Follow parameters that were frozen or thawed.

        Raises:
            StrategyError: the optimizer was given other parameters.
        """
        how = "give it all from the beginning, and freeze and train them with requires_grad_()"
        if self.own_loop:
            how = "call lockstep.parallelize again, with the model as it is now"
        changed = self.trained.changed(how)
        if changed is not None:
            self._follow_flags(changed)
        for name, p in self.trained.others.items():
            if p.requires_grad and self.world.is_first:
                note = (
                    f'"{name}" requires gradients now, but is not in the optimizer: build it '
                    "trainable, and freeze it later (on_start of a callback)"
                )
                self.log_once([note])
                break

    def _follow_flags(self, name: str) -> None:
        """Follow a person who has frozen or thawed parameters of the optimizer.

        Args:
            name: of the first of them.
        """
        self.accumulation.refuse_waiting(
            f'parameter "{name}" was frozen, or is trained from now on'
        )
        for p in self.trained.values:
            p.grad = None
        self.trained.find()
        if not self.trained.values:
            raise StrategyError(
                "all parameters that the optimizer has are frozen now: leave one to be trained, or "
                "call step.evaluate(...), which needs no gradients"
            )
        self._followed = self._updates + 1

    def _compile_models(self) -> None:
        """Compile the models in place, so that modules keep their names."""
        if self._compile:
            compile_models(self.models(), self._compile)

    # ---- evaluation and saved state; all of these are called on every rank -----------------------

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the model in evaluation mode, without gradients, in this context."""
        return self.evaluator.evaluating()

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Compute this process's share without an update.

        Args:
            inputs, targets: as the step itself takes them; None where this process has no share.

        Returns:
            Outputs, total and count; None, 0 and 0 where this process has no share.

        Raises:
            InputError: the loss or the model can't take them.
        """
        return self.evaluator.evaluate(inputs, targets)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Give a context with whole parameters in model and optimizer, which every rank enters."""
        return self.layout.whole()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of weights and the optimizer's state, under one-device names.

        ``load`` takes it up under any strategy and number of devices. A crash leaves what was there
        before.

        Raises:
            SaveError: the checkpoint can't be written.
            InputError: some ranks don't call this.
        """
        self.meet("step.save(...)")
        self.saved.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Take over the checkpoint that ``save`` wrote.

        Raises:
            FolderError: there is no checkpoint, or it can't be read.
            InputError: it is of another model, gradients wait, or some ranks don't call this.
        """
        self.accumulation.refuse_waiting("step.load(...)")
        self.meet("step.load(...)")
        self.saved.load(Path(folder))

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Give ``{"model": ..., "optimizer": ...}`` under the names of the one-device model.

        The optimizer's state is by parameter name too, so it does not depend on the order of
        groups.

        Args:
            whole: False gives this rank's rows (`RowShard`) of tensors that ranks share out.

        Raises:
            InputError: some ranks don't call this, or gradients wait for an update; they would be
                lost.
        """
        self.accumulation.refuse_waiting("step.state_dict()")
        if self.own_loop:
            self.meet("step.state_dict()")
            self.after_events()
        self.share_buffers()
        return self.saved.state_dict(whole=whole)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, under any strategy and number of devices.

        Raises:
            InputError: the names or shapes are another model's, or gradients wait for an update.
        """
        self.accumulation.refuse_waiting("step.load_state_dict(...)")
        self.saved.load_state_dict(state)
        if self.own_loop:
            self.saved.restore_flags()

    def meet(self, what: str) -> None:
        """In a loop of a person's own, make sure that every rank calls ``what``.

        Raises:
            InputError: a rank doesn't.
        """
        if self.own_loop:
            self.world.meet(what, together=self.together)

    # ---- what strategies give --------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """List the replicas of this process."""
        return [self.model]

    def _generators(self) -> list[torch.Generator]:
        """List the generators that replicas draw from, beside PyTorch's own."""
        return []

    def _own_parameters(self) -> Mapping[str, nn.Parameter]:
        """Give what this process has of each parameter, by name; the optimizer has it."""
        return dict(self.model.named_parameters())

    def share_buffers(self) -> None:
        """Give every replica the first one's buffers (running statistics), before an evaluation
        or a save.
        """

    def after_events(self) -> None:
        """Follow what a person's functions, which run on rank 0 only, may have changed."""

    def _refuse_gaps(self, here: list[bool]) -> None:
        """Refuse that a rank has no sample and a later one has, in strategies that can't take it.

        Args:
            here: whether each rank has a sample.
        """

    def over_ranks(self, loss: Loss) -> Loss:
        """Sum the loss of this rank's results of an epoch over all ranks."""
        return loss

    def seed(self, seed: int, number: int | None = None) -> None:
        """Begin a random stream of this step, or of a batch with that number, and this rank."""
        self.draws.begin(seed, self.world.step if number is None else number)

    def log_once(self, notes: Iterable[Caveat | str]) -> None:
        """Log each note that was not logged before."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self.world.emit(Line.note(note))

    def log_loss_notes(self) -> None:
        """Log what the check of the loss has noted on this rank."""
        self.log_once(self.loss_check.notes)
        self.loss_check.notes.clear()
