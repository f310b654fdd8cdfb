"""Evaluator: a model under a strategy, asked for outputs and losses without an update. Every step
is one.

What strategies have of their own here: where a share is computed (``results``, ``predictions``,
``over``).
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
from lockstep.model.losses.loss_check import LossCheck, squeezing_explained
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


class Evaluator:
    """One model on this process's devices.

    Attributes:
        model: the model under its one-device names.
        world: this process's place among the ranks.
        layout: what each rank has of the parameters.
        loss: gives total and count.
    """

    _shares_parameters = False
    """Whether the replicas of this process have the same parameters."""

    has_own_callbacks = False
    """Whether callbacks of a person's own see it between updates."""

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
        self._stream: tuple[int, ...] | None = None
        self._accumulate = job.accumulate
        self._accepts_differences = job.accept_differences
        self.loss_check = self._new_loss_check()
        self._judged = 0

    @property
    def replicas(self) -> int:
        """How many copies of the model there are over all ranks, each with a local batch of its
        own.
        """
        return self.world.layout.local_batches

    @property
    def _cuts_each_batch(self) -> bool:
        """Whether each global batch is cut, among replicas or in micro-batches."""
        return self.replicas * self._accumulate > 1

    @property
    def cuts_batch(self) -> bool:
        """Whether a loss sees less than the global batch, so that it must be additive over
        samples.
        """
        return self._cuts_each_batch

    def _new_loss_check(self) -> LossCheck:
        return LossCheck(self.loss, cuts=self.cuts_batch, accepts=self._accepts_differences)

    def models(self) -> list[nn.Module]:
        """The replicas of this process."""
        return [self.model]

    def whole_parameters(self) -> AbstractContextManager[None]:
        """The model and the optimizer have whole parameters in this context, which every rank
        enters.
        """
        return self.layout.whole()

    def _follow_modes(self) -> None:
        """Give replicas that share the first one's parameters its mode: their own ``train``
        would write these again.
        """

    def share_buffers(self) -> None:
        """Give every replica the first one's buffers (running statistics), before an evaluation
        or a save.
        """

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, without gradients; each module's own mode comes back
        afterwards.

        An ``nn.TransformerEncoder`` computes padding as it does in training: PyTorch makes zeros of
        it, in evaluation only, and not under a function mode or hooks, as some strategies have
        them.
        """
        every = [module for model in self.models() for module in model.modules()]
        nests = [
            m
            for m in every
            if isinstance(m, nn.TransformerEncoder) and getattr(m, "use_nested_tensor", False)
        ]
        own = self.models()[:1] if self._shares_parameters else self.models()
        modes = [(module, module.training) for model in own for module in model.modules()]
        stream = self._stream
        self.share_buffers()
        self.loss.follow()
        writes = any(
            has_own_train(module) for module, _ in modes
        )  # which may merge adapters into weights
        around = self.whole_parameters if writes else nullcontext
        with around():
            for model in own:
                model.eval()
        self._follow_modes()
        for encoder in nests:
            encoder.use_nested_tensor = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._stream = stream
            for encoder in nests:
                encoder.use_nested_tensor = True
            with around(), torch.no_grad():
                set_modes(modes)
            self._follow_modes()

    def evaluate(self, inputs: Any, targets: Any = None) -> tuple[Any, Number, Number]:
        """Outputs, total and count of this process's share, without an update; of None they are
        None, 0 and 0.

        Args:
            inputs, targets: as the step itself takes them.

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
            outputs, (total, count) = self.outputs(Part(inputs, targets, size, size))
            return outputs, total, count

    @property
    def number(self) -> int:
        """Of the update, from 1."""
        return self.world.step

    # ---- within ``evaluating()`` -----------------------------------------------------------------

    def over(
        self, batches: Iterable[Batch], compute: Callable[[Batch], T], seed: int | None = None
    ) -> Iterator[tuple[Batch, T]]:
        """Each batch, in order, with what ``compute`` makes of it.

        Args:
            batches: of the loader.
            compute: ``results`` or ``predictions``, or what calls one of them.
            seed: gives each batch a random stream of its own; None goes on with the stream there
                is.
        """
        self._refuse_parts()
        for batch in batches:
            if seed is not None:
                self._begin_batch(batch, seed)
            yield batch, compute(batch)

    def _refuse_parts(self) -> None:
        if isinstance(self.model, nn.ModuleDict):
            first = next(iter(self.model))
            raise JobError(
                f"model: it is the parts {', '.join(self.model)}, without a forward to evaluate "
                "or predict with: call "
                f'a part yourself (run.model()["{first}"]), or give a Module with a forward'
            )

    def _begin_batch(self, batch: Batch, seed: int) -> None:
        self.seed(seed, batch.index + 1)

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Outputs, targets and loss of each of this process's shares of an evaluation batch, not
        empty ones.
        """
        return [
            (outputs, part.targets, loss)
            for part, (outputs, loss) in self._of_each(self.judged, batch)
        ]

    def predictions(self, batch: Batch) -> list[tuple[int, Any]]:
        """Samples and outputs of each of this process's shares of a batch that isn't empty.

        The loss isn't called.
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

    def outputs(self, part: Part) -> tuple[Any, Loss]:
        """Outputs and loss of a part of this process's."""
        return self.judged(self.model, self.placed(part))

    def judged(self, model: nn.Module, part: Part) -> tuple[Any, Loss]:
        """What ``model`` makes of a part that is on its device: outputs and loss."""
        self._judged += 1
        with self._precision.autocast():
            outputs = self.forward(model, part)
            checks = self.replicas > 1 and self.loss_check.wants(self._judged)
            loss = self._loss_of(outputs, part, step=0, checks=checks)
        return outputs, loss

    def _loss_of(self, outputs: Any, part: Part, *, step: int, checks: bool) -> Loss:
        """Total, count and parts of the loss, which is held to being additive where it is checked.

        A loss that writes to its arguments isn't checked.
        """
        targets = part.targets
        given = copied_nest((outputs, targets)) if checks else None  # the loss may change lists
        before = versions(given) if checks else None
        with self.loss.one_at_a_time, squeezing_explained(outputs, targets, part.size):
            loss = self.loss(outputs, targets, part.size)
        if given is not None and versions(given) == before:
            self._check_loss(*given, part.size, loss, step)
        return loss

    def _check_loss(self, outputs: Any, targets: Any, size: int, loss: Loss, step: int) -> None:
        if not self._on_accelerator:
            self.loss_check(outputs, targets, loss, size, step=step, waits=True)

    def forward(self, model: nn.Module, part: Part) -> Any:
        """Outputs of ``model`` for a part.

        Raises:
            JobError: one of PyTorch's layers can't take what it is given.
        """
        try:
            return call(model, part.inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if (why := layer_error(model, error)) is None:
                raise
            raise why from error

    def placed(self, part: Part, device: Device | None = None) -> Part:
        """The part in the job's number format and layout, on a device.

        Where none is named, inputs are on this process's first device, and targets on its last one.
        """
        place, end = (
            (device, device)
            if device is not None
            else (self.world.devices[0], self.world.devices[-1])
        )
        if self._dtype is None and not self._channels_last and place.is_slot and end.is_slot:
            return part
        inputs = to_device(part.inputs, place.torch, self._dtype, channels_last=self._channels_last)
        return Part(
            inputs,
            to_device(part.targets, end.torch, self._dtype),
            part.size,
            part.of,
            part.samples,
        )

    # ---- random numbers --------------------------------------------------------------------------

    def seed(self, seed: int, number: int | None = None) -> None:
        """Begin a random stream of its own for this step (or that number) and rank, so that it
        can be repeated.
        """
        self._stream = seed, self.world.step if number is None else number, self.world.data.rank
        self._seed_all(mixed(*self._stream))

    def _seed_all(self, key: int) -> None:
        seed_all(key)
        if self._on_accelerator:
            seed_on(self.world.device.torch, key)

    @property
    def accelerators(self) -> tuple[torch.device, ...]:
        """The devices of this process that are no CPU devices."""
        return tuple(d.torch for d in self.world.devices if d.type not in ("cpu", "meta"))

    def _time(self) -> float:
        """Seconds on a clock, when the accelerators have done what they were given."""
        for device in self.accelerators:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    @contextmanager
    def _own_streams_of_parts(self, parts: int, number: int = 0) -> Iterator[None]:
        """Give the micro-batches of a step random streams of their own, where nobody has called
        ``seed``.

        They follow from where the caller's stream stands, so that they are the same in whichever
        order, or how far overlapped, a strategy computes them; that stream stays there, as where no
        micro-batch draws. ``number`` is that of the call in this update.
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
        """Give micro-batch ``number`` a random stream of its own, so that it draws the same
        whenever it is computed.
        """
        if number and self._stream is not None:
            self._seed_all(mixed(*self._stream, number))
