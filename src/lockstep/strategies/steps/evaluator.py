"""Evaluator: a model under a strategy, asked for outputs and losses without an update.

Every step is an evaluator. Strategies override where a share is computed (``results``,
``predictions``, ``over``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.errors import JobError, LossError
from lockstep.launch.devices import Device
from lockstep.launch.observer import observed
from lockstep.launch.world import World
from lockstep.model.layer_error import layer_error
from lockstep.model.losses.loss import Loss, Number, Totalled
from lockstep.model.losses.loss_check import LossCheck, explain_squeezing
from lockstep.model.modes import has_own_train, set_modes
from lockstep.model.precision import Precision
from lockstep.recipe import Recipe
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.tensors.pytree import call, copied_nest, to_device, versions
from lockstep.tensors.rows import batch_size_of
from lockstep.tensors.seeding import kept_states, seed_all, seed_on

T = TypeVar("T")


def no_loss(outputs: Any, targets: Any) -> Any:
    """Stands for the loss of a job that has none.

    Raises:
        LossError: always.
    """
    raise LossError("the job has no loss(outputs, targets): its step function computes several")


def _encoders_with_nested_tensors(models: Iterable[nn.Module]) -> list[Any]:
    """Find the encoders that make nested tensors of padded ones in evaluation."""
    found = []
    for model in models:
        for module in model.modules():
            is_encoder = isinstance(module, nn.TransformerEncoder)
            if is_encoder and getattr(module, "use_nested_tensor", False):
                found.append(module)
    return found


class Evaluator:
    """One model on this process's devices.

    Attributes:
        model: the model under its one-device names.
        world: this process's place among the ranks.
        layout: what each rank has of the parameters.
        loss: gives total and count.
        replicas: how many copies of the model there are over all ranks, each with its local batch.
    """

    _shares_parameters = False
    """Whether the replicas of this process have the same parameters."""

    has_own_callbacks = False
    """Whether callbacks of a person's own see the model between updates."""

    layout: ParameterLayout

    def __init__(self, model: nn.Module, job: Recipe, world: World) -> None:
        self.model = model
        self.world = world
        self.observers = world.observers
        self._channels_last = job.channels_last
        self._precision = Precision(job.precision, world)
        self._dtype = self._precision.whole
        self.loss = Totalled(no_loss if job.loss is None else job.loss, self._dtype)
        self._on_accelerator = not world.device.is_slot
        self._converts = self._on_accelerator or self._dtype is not None or self._channels_last
        self._stream: tuple[int, ...] | None = None
        self._data_rank = world.data.rank
        self._accumulate = job.accumulate
        self.replicas = world.layout.local_batches
        # Each global batch is cut, among replicas or in micro-batches.
        self._cuts_each_batch = self.replicas * self._accumulate > 1
        self._accepts_differences = job.accept_differences
        self.loss_check = self._new_loss_check()
        self._judged = 0

    @property
    def cuts_batch(self) -> bool:
        """Whether a loss sees less than the global batch, so that it must be additive over
        samples.
        """
        return self._cuts_each_batch

    def _new_loss_check(self) -> LossCheck:
        return LossCheck(self.loss, cuts=self.cuts_batch, accepts=self._accepts_differences)

    def models(self) -> list[nn.Module]:
        """List the replicas of this process."""
        return [self.model]

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Give a context with whole parameters in model and optimizer, which every rank enters."""
        return self.layout.whole()

    def _follow_modes(self) -> None:
        """Give replicas that share the first one's parameters the mode of the first.

        Their own ``train`` would write these parameters again.
        """

    def share_buffers(self) -> None:
        """Give every replica the first one's buffers (running statistics), before an evaluation
        or a save.
        """

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode, without gradients; afterwards each module gets back the
        mode it had.

        An ``nn.TransformerEncoder`` computes padding as it does in training. PyTorch would make
        zeros of it in evaluation, but not under the function modes and hooks of some strategies.
        """
        encoders = _encoders_with_nested_tensors(self.models())
        own = self.models()[:1] if self._shares_parameters else self.models()
        modes = [(module, module.training) for model in own for module in model.modules()]
        stream = self._stream
        self.share_buffers()
        self.loss.follow()
        # A module's own ``train`` may merge adapters into weights.
        writes = any(has_own_train(module) for module, _ in modes)
        around = self.whole_parameters if writes else nullcontext
        with around():
            for model in own:
                model.eval()
        self._follow_modes()
        for encoder in encoders:
            encoder.use_nested_tensor = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._stream = stream
            for encoder in encoders:
                encoder.use_nested_tensor = True
            with around(), torch.no_grad():
                set_modes(modes)
            self._follow_modes()

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Compute this process's share without an update.

        Args:
            inputs, targets: as the step itself takes them; None where this process has no share.

        Returns:
            Outputs, total and count; None, 0 and 0 where this process has no share.

        Raises:
            InputError: the loss or the model can't take them.
        """
        self._refuse_parts()
        if isinstance(inputs, Batch):
            inputs, targets = inputs
        size = 0 if inputs is None else batch_size_of(inputs)
        with self.evaluating():
            if inputs is None:
                return None, 0.0, 0
            outputs, (total, count) = self._outputs(Part(inputs, targets, size, size))
            return outputs, total, count

    @property
    def number(self) -> int:
        """The number of the update, from 1."""
        return self.world.step

    # ---- within ``evaluating()`` -----------------------------------------------------------------

    def over(
        self, batches: Iterable[Batch], compute: Callable[[Batch], T], seed: int | None = None
    ) -> Iterator[tuple[Batch, T]]:
        """Yield each batch, in order, with what ``compute`` makes of it.

        Args:
            batches: of the loader.
            compute: ``results`` or ``predictions``, or what calls one of them.
            seed: gives each batch a random stream; None goes on with the stream there is.
        """
        self._refuse_parts()
        for batch in batches:
            if seed is not None:
                self.seed(seed, batch.index + 1)
            yield batch, compute(batch)

    def _refuse_parts(self) -> None:
        if isinstance(self.model, nn.ModuleDict):
            first = next(iter(self.model))
            raise JobError(
                f"model: it is the parts {', '.join(self.model)}, without a forward to evaluate "
                f'or predict with: call a part yourself (run.model()["{first}"]), or give a Module '
                "with a forward"
            )

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Compute outputs and loss of each of this process's shares of an evaluation batch.

        Empty shares are left out.

        Returns:
            Outputs, targets and loss of each share.
        """
        found = []
        for part, (outputs, loss) in self._of_each(self.judged, batch):
            found.append((outputs, part.targets, loss))
        return found

    def predictions(self, batch: Batch) -> list[tuple[int, Any]]:
        """Compute the outputs of each of this process's shares of a batch that isn't empty.

        The loss isn't called.

        Returns:
            The number of samples and the outputs of each share.
        """
        return [(part.size, outputs) for part, outputs in self._of_each(self._predicted, batch)]

    def _of_each(
        self, function: Callable[[nn.Module, Part], T], batch: Batch
    ) -> list[tuple[Part, T]]:
        """Call a function for each replica of this process that has a share of a batch; gives
        each share too.
        """
        if not batch.parts[0].size:
            return []
        part = self.placed(batch.parts[0])
        return [(part, function(self.model, part))]

    def _predicted(self, model: nn.Module, part: Part) -> Any:
        with self._precision.autocast():
            return self.forward(model, part)

    def _outputs(self, part: Part) -> tuple[Any, Loss]:
        """Compute outputs and loss of a part of this process."""
        return self.judged(self.model, self.placed(part))

    def judged(self, model: nn.Module, part: Part) -> tuple[Any, Loss]:
        """Compute outputs and loss of a part that is on the device of ``model``."""
        self._judged += 1
        with self._precision.autocast():
            outputs = self.forward(model, part)
            checks = not self._on_accelerator and self.replicas > 1
            checks = checks and self.loss_check.wants(self._judged)
            loss = self._loss_of(outputs, part, step=0, checks=checks)
        return outputs, loss

    def _loss_of(self, outputs: Any, part: Part, *, step: int, checks: bool) -> Loss:
        """Compute total, count and parts of the loss, and check that it is additive where wanted.

        A loss that writes to its arguments isn't checked.

        Args:
            outputs: of the model.
            part: has the targets.
            step: the update, for messages; 0 in an evaluation.
            checks: whether to check the loss.
        """
        targets = part.targets
        if checks:
            given = copied_nest((outputs, targets))  # the loss may change lists
            before = versions(given)
        try:
            loss = self.loss(outputs, targets, part.size)
        except Exception as error:
            explain_squeezing(error, outputs, targets, part.size)
            raise
        if checks and versions(given) == before:
            self._check_loss(*given, part.size, loss, step)
        return loss

    def _check_loss(self, outputs: Any, targets: Any, size: int, loss: Loss, step: int) -> None:
        """Check that the loss of a local batch is additive; `Step` does."""

    def forward(self, model: nn.Module, part: Part) -> Any:
        """Compute the outputs of ``model`` for a part.

        Raises:
            JobError: one of PyTorch's layers can't take what it is given.
        """
        try:
            return call(model, part.inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            why = layer_error(model, error)
            if why is None:
                raise
            raise why from error

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
        inputs = to_device(part.inputs, first.torch, self._dtype, channels_last=self._channels_last)
        targets = to_device(part.targets, last.torch, self._dtype)
        return Part(inputs, targets, part.size, part.of, part.samples)

    # ---- random numbers --------------------------------------------------------------------------

    def seed(self, seed: int, number: int | None = None) -> None:
        """Begin a random stream of this step and rank, which can be repeated.

        Args:
            seed: of the job.
            number: of a batch, instead of the step.
        """
        if number is None:
            number = self.world.step
        self._stream = (seed, number, self._data_rank)
        self._seed_all(mixed(*self._stream))

    def _seed_all(self, key: int) -> None:
        seed_all(key)
        if self._on_accelerator:
            seed_on(self.world.device.torch, key)

    @property
    def accelerators(self) -> tuple[torch.device, ...]:
        """The devices of this process other than CPU devices."""
        return tuple(d.torch for d in self.world.devices if d.type not in ("cpu", "meta"))

    def _time(self) -> float:
        """Read a clock in seconds, once the accelerators have done what they were given."""
        for device in self.accelerators:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    @contextmanager
    def _own_streams_of_parts(self, parts: int, number: int = 0) -> Iterator[None]:
        """Give each micro-batch of a step a random stream, where nobody has called ``seed``.

        The streams follow from where the caller's stream stands, which stays there. So they are the
        same in whichever order a strategy computes the micro-batches.

        Args:
            parts: how many micro-batches there are.
            number: of the call in this update.
        """
        if self.world.size > 1 or parts == 1 or self._stream is not None:
            yield
            return
        with kept_states(self.accelerators):
            key = mixed(int(torch.randint(2**62, ())), self.world.step, number)
            self._stream = (key,)
            self._seed_all(mixed(key))
            try:
                yield
            finally:
                self._stream = None

    @observed(lambda observer, step, number: observer.microbatch(number))
    def _begin_part(self, number: int) -> None:
        """Give micro-batch ``number`` its random stream, the same whenever it is computed."""
        if number and self._stream is not None:
            self._seed_all(mixed(*self._stream, number))
