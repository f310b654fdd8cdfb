"""Averaged weights: a moving average (EMA), and the mean over epochs (SWA).

An average has the model's one-device names, and lies beside each weight, or this rank's part of it,
on its device. So every strategy whose ranks have the same weights after each update has the same
average, with no communication. Evaluations are made with the average put in the model's place, the
best weights are chosen by it, and it is written as a file at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.errors import JobError, StrategyError
from lockstep.run.events import Line
from lockstep.strategies.steps.step import Step
from lockstep.training.callbacks.callback import Callback, TrainingContext

Tensors = dict[str, torch.Tensor]


class Average(Callback):
    """An average of the model's weights.

    A subclass decides, in ``on_step`` or ``on_epoch``, when the weights are added, and how much
    they count.

    Args:
        raw: see below.

    Attributes:
        raw: whether the model's own weights are evaluated too: ``raw/eval_loss``.
        output: the name of the average in the run's folder.
        buffers: whether buffers of floats are averaged too.
    """

    output = "average.safetensors"

    buffers = False

    def __init__(self, *, raw: bool = False) -> None:
        self.raw = raw
        self._parameters: Tensors = {}
        self._average: Tensors = {}
        self._number = 0  # of weights in it
        self._step: Step | None = None  # from on_start on

    def on_start(self, training: TrainingContext) -> None:
        """Put an average that was saved on the weights' devices.

        Raises:
            StrategyError: the ranks don't have the same weights after an update.
        """
        world = training.world
        if world.size > 1 and not world.layout.together:
            raise StrategyError(
                f"{type(self).__name__}: each rank would average other weights: take ddp"
            )

        step = training._step
        self._step = step
        # (Collecting them takes as long as an average for a model of many modules.)
        for name, part in step.layout.parts().items():
            if name not in training.left_out:
                self._parameters[name] = part
        weights = self._weights(training)

        for name, average in self._average.items():
            # In the weights' memory layout: else sums of the same numbers may round otherwise.
            placed = torch.empty_like(weights[name], dtype=average.dtype)
            self._average[name] = placed.copy_(step.layout.part_of(name, average))

    def _weights(self, training: TrainingContext) -> Tensors:
        """Return the weights that are averaged, as they are now."""
        tensors: Tensors = dict(self._parameters)
        if self.buffers:
            tensors.update(training.model.named_buffers())
        weights = {}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() or tensor.is_complex():
                weights[name] = tensor.detach()
        return weights

    @torch.no_grad()
    def _add(self, training: TrainingContext, weight: float) -> None:
        """Move the average towards the weights as they are: ``average += weight * (weights -
        average)``.

        The first weights are taken as they are.
        """
        weights = self._weights(training)
        self._number += 1
        if not self._average:
            for name, tensor in weights.items():
                # In float32 where weights have 16 bits, which would not show a small move.
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                self._average[name] = tensor.to(dtype, copy=True)
            return

        averages = []
        towards = []
        for name, tensor in weights.items():
            average = self._average[name]
            averages.append(average)
            towards.append(tensor.to(average.dtype))
        torch._foreach_lerp_(averages, towards, weight)

    @contextlib.contextmanager
    def evaluating(self, training: TrainingContext) -> Iterator[None]:
        """Put the average in place of the model's weights."""
        weights = self._weights(training) if self._average else {}
        # All are copied before any is written: some may share memory.
        before = {name: tensor.clone() for name, tensor in weights.items()}

        try:
            with torch.no_grad():
                for name, tensor in weights.items():
                    tensor.copy_(self._average[name])
            yield
        finally:
            with torch.no_grad():
                for name, tensor in before.items():
                    weights[name].copy_(tensor)

    def on_finish(self, training: TrainingContext) -> None:
        """Write the average, with the model's other buffers, as a state dict of the one-device
        model.
        """
        if not self._average:
            return
        with self.evaluating(training):
            training._step.saved.write_weights(training.folder / self.output)
        if training.world.is_first:
            text = (
                f"the averaged weights are in {self.output}, the trained weights in "
                "model.safetensors"
            )
            training.world.emit(Line.note(text))

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and of how many weights it is."""
        return self._state(rows=False)

    def rows(self) -> dict[str, Any]:
        """Return the state with this rank's rows of what it has a part of."""
        return self._state(rows=True)

    def _state(self, *, rows: bool) -> dict[str, Any]:
        """Return the state: this rank's rows of it, or the whole."""
        average: dict[str, Any] = dict(self._average)
        if self._step is not None:
            layout = self._step.layout
            of_part = layout.rows if rows else layout.joined
            for name, part in average.items():
                average[name] = of_part(name, part)
        return {"average": average, "number": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._average = dict(state["average"])
        self._number = state["number"]


class EMA(Average):
    """Exponential moving average of the parameters: ``average = decay * average + (1 - decay) *
    parameters``.

    It begins with the parameters as they are before the first step, and moves after each update.
    Buffers (running statistics) are those of the model. Evaluations are made with it; at the end it
    is in ``ema.safetensors``, which ``run.model("ema.safetensors")`` gives::

        run = lockstep.train(job, callbacks=[EMA(0.99)])
        model = run.model("ema.safetensors")

    Args:
        decay: from 0 to 1, usually 0.99 to 0.9999; or a function of the step (from 1) that gives
            it: ``lambda step: min(0.999, (1 + step) / (10 + step))``.
        every: updates from one move to the next.
        raw: evaluate the model's own weights too: ``raw/eval_loss``, ``raw/accuracy``.
    """

    output = "ema.safetensors"

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        *,
        every: int = 1,
        raw: bool = False,
    ) -> None:
        super().__init__(raw=raw)
        is_wrong = not callable(decay) and not 0 <= decay < 1
        if is_wrong or every < 1:
            raise JobError(
                f"EMA: decay is from 0 to below 1, every from 1 on, not {decay} and {every}"
            )
        self._decay = decay
        self._every = every

    def on_start(self, training: TrainingContext) -> None:
        """Begin with the parameters as they are."""
        super().on_start(training)
        if not self._average:
            self._add(training, 1.0)

    def on_step(self, training: TrainingContext) -> None:
        """Move the average."""
        if training.step % self._every == 0:
            self._add(training, 1 - self._decay_at(training.step))

    def _decay_at(self, step: int) -> float:
        """Return the decay at this step.

        Raises:
            JobError: the function gives a number that is no decay.
        """
        if not callable(self._decay):
            return self._decay
        decay = float(self._decay(step))
        if not 0 <= decay <= 1:
            raise JobError(f"EMA: decay is from 0 to 1, and decay({step}) gave {decay}")
        return decay


class SWA(Average):
    """Stochastic weight averaging: the mean of the weights at the ends of epochs,
    https://arxiv.org/abs/1803.05407.

    Buffers of floats are averaged too, as ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``
    does, in place of another pass over the training data for the running statistics of batch norms.
    From the first averaged epoch on evaluations are made with the mean; at the end it is in
    ``swa.safetensors``. ``torch.optim.swa_utils.SWALR`` is a scheduler for it::

        job = job.replace(
            callbacks=[SWA(start=8)],
            lr_scheduler=lambda optimizer: SWALR(optimizer, swa_lr=0.05),
        )

    Args:
        start: the first epoch whose end is averaged, from 1.
        raw: evaluate the model's own weights too: ``raw/eval_loss``, ``raw/accuracy``.
    """

    output = "swa.safetensors"
    buffers = True

    def __init__(self, start: int = 1, *, raw: bool = False) -> None:
        super().__init__(raw=raw)
        self._start = start

    def on_epoch(self, training: TrainingContext) -> None:
        """Add the weights to the mean."""
        if training.epoch >= self._start:
            self._add(training, 1 / (self._number + 1))
