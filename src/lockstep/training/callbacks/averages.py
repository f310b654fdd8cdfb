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
from lockstep.launch.events import Line
from lockstep.tensors.row_shard import RowShard
from lockstep.training.callbacks.callback import Callback, TrainingContext

Tensors = dict[str, torch.Tensor]


class Average(Callback):
    """An average of the model's weights; ``output`` is its name in the run's folder."""

    output = "average.safetensors"
    buffers = False
    """Whether buffers of floats are averaged too."""

    def __init__(self) -> None:
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._average: Tensors = {}
        self._number = 0  # of weights in it
        self._joined: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, average: average
        self._rows: Callable[[str, torch.Tensor], torch.Tensor | RowShard] = self._joined

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
        self._joined, self._rows = training._step.joined, training._step.rows
        now = self._weights(
            training
        )  # (in their memory layout too: else sums of the same numbers may round otherwise)
        self._average = {
            name: torch.empty_like(now[name], dtype=average.dtype).copy_(
                training._step.part_of(name, average)
            )
            for name, average in self._average.items()
        }

    def _weights(self, training: TrainingContext) -> Tensors:
        if not self._parameters:  # (for a model of many modules this takes as long as an average)
            parts = training._step.parts().items()
            self._parameters = [of for of in parts if of[0] not in training.left_out]
        named = [*self._parameters, *(training.model.named_buffers() if self.buffers else ())]
        return {
            name: tensor.detach()
            for name, tensor in named
            if tensor.is_floating_point() or tensor.is_complex()
        }

    @torch.no_grad()
    def _add(self, training: TrainingContext, weight: float) -> None:
        """Move the average towards the weights as they are, by a fraction; the first ones are
        taken as they are.
        """
        now = self._weights(training)
        self._number += 1
        if (
            not self._average
        ):  # (in float32 where weights have 16 bits, which would not show a small move)
            wide = {
                name: torch.promote_types(tensor.dtype, torch.float32)
                for name, tensor in now.items()
            }
            self._average = {name: tensor.to(wide[name], copy=True) for name, tensor in now.items()}
            return
        towards = [tensor.to(self._average[name].dtype) for name, tensor in now.items()]
        torch._foreach_lerp_(list(self._average.values()), towards, weight)

    @contextlib.contextmanager
    def evaluating(self, training: TrainingContext) -> Iterator[None]:
        """With the average in place of the model's weights."""
        kept: Tensors = {}
        now = self._weights(training) if self._average else {}
        try:
            with torch.no_grad():
                kept = {
                    name: tensor.clone() for name, tensor in now.items()
                }  # before any: some may share memory
                for name, tensor in now.items():
                    tensor.copy_(self._average[name])
            yield
        finally:
            with torch.no_grad():
                for name, tensor in kept.items():
                    now[name].copy_(tensor)

    def on_finish(self, training: TrainingContext) -> None:
        """Write the average, with the model's other buffers, as a state dict of the one-device
        model.
        """
        if not self._average:
            return
        with self.evaluating(training):
            training._step.write_weights(training.folder / self.output)
        if training.world.is_first:
            said = (
                f"the averaged weights are in {self.output}, those that were trained in "
                "model.safetensors"
            )
            training.world.tell(Line.note(said))

    def state_dict(self) -> dict[str, Any]:
        """The average, and of how many weights it is."""
        return self._state(self._joined)

    def rows(self) -> dict[str, Any]:
        """As ``state_dict``, with this rank's rows of what it has a part of."""
        return self._state(self._rows)

    def _state(self, of: Callable[[str, torch.Tensor], Any]) -> dict[str, Any]:
        return {
            "average": {name: of(name, part) for name, part in self._average.items()},
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self._average, self._number = dict(state["average"]), state["number"]


class EMA(Average):
    """Exponential moving average of the parameters: ``average = decay * average + (1 - decay) *
    parameters``.

    It begins with the parameters as they are before the first step, and moves after each update.
    Buffers (running statistics) are those of the model. Evaluations are made with it; at the end it
    is in ``ema.safetensors``, which ``run.model("ema.safetensors")`` gives.

    Args:
        decay: from 0 to 1, usually 0.99 to 0.9999.
        every: updates from one move to the next.
    """

    output = "ema.safetensors"

    def __init__(self, decay: float = 0.999, *, every: int = 1) -> None:
        super().__init__()
        if not 0 <= decay < 1 or every < 1:
            raise JobError(
                f"EMA: decay is from 0 to below 1, every from 1 on, not {decay} and {every}"
            )
        self._decay, self._every = decay, every

    def on_start(self, training: TrainingContext) -> None:
        """Begin with the parameters as they are."""
        super().on_start(training)
        if not self._average:
            self._add(training, 1.0)

    def on_step(self, training: TrainingContext) -> None:
        """Move the average."""
        if training.step % self._every == 0:
            self._add(training, 1 - self._decay)


class SWA(Average):
    """Stochastic weight averaging: the mean of the weights at the ends of epochs,
    https://arxiv.org/abs/1803.05407.

    Buffers of floats are averaged too, as ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``
    does, in place of another pass over the training data for the running statistics of batch norms.
    From the first averaged epoch on evaluations are made with the mean; at the end it is in
    ``swa.safetensors``. ``torch.optim.swa_utils.SWALR`` is a scheduler for it.

    Args:
        start: the first epoch whose end is averaged, from 1.
    """

    output = "swa.safetensors"
    buffers = True

    def __init__(self, start: int = 1) -> None:
        super().__init__()
        self._start = start

    def on_epoch(self, training: TrainingContext) -> None:
        """Add the weights to the mean."""
        if training.epoch >= self._start:
            self._add(training, 1 / (self._number + 1))
