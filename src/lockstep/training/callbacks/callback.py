"""Callback: what acts on a training at each point of it, and the training as it sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result


class TrainingContext:
    """The training, as a callback sees it on its rank.

    Attributes:
        epoch: the epoch that the training is in, from 1 (0 at the start).
        metrics: what is known by then: in ``on_log`` and ``on_epoch`` the training's losses, from
            ``on_evaluated`` on also those of the evaluation. A number that is added there goes into
            ``metrics.jsonl`` with the others.
        result: of the last update, in ``on_step``; on an accelerator ``result.loss`` waits for it.
        folder: of the run. Only rank 0 may write there.
        stopping: why a callback on this rank has ended the training; None where none has.
        frozen_by: the ``Freeze`` callbacks that freeze each parameter now.
    """

    def __init__(
        self,
        step: Step,
        folder: Path,
        evaluated_weights: Callable[[], AbstractContextManager[None]],
        writer: Callable[[TrainingContext], Any],
    ) -> None:
        self._step = step
        self._evaluated_weights = evaluated_weights
        self._writer = writer
        self.folder = folder
        self.epoch = 0
        self.metrics: dict[str, float] = {}
        self.result: Result | None = None
        self.stopping: str | None = None
        self.frozen_by: dict[nn.Parameter, set[Callback]] = {}

    def _begin_call(self, epoch: int, metrics: dict[str, float]) -> None:
        """Set what the callbacks are to see in the next call."""
        self.epoch = epoch
        self.metrics = metrics
        self.stopping = None

    @property
    def model(self) -> nn.Module:
        """Return the model under its one-device names.

        Under ``mp`` and ``pp`` its layers are on several devices.
        """
        return self._step.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return this process's optimizer."""
        return self._step.optimizer

    @property
    def world(self) -> World:
        """Return this process's place among the ranks."""
        return self._step.world

    @property
    def step(self) -> int:
        """Return the number of updates so far."""
        return self._step.world.step

    @property
    def left_out(self) -> Mapping[str, str]:
        """Return the parameters that are in no file (``save_frozen=False``), by name."""
        return self._step.saved.frozen.sums

    @property
    def writer(self) -> Any:
        """Return TensorBoard's ``SummaryWriter`` of the run, for pictures, texts and histograms.

        It is on rank 0, and None on the other ranks.

        Raises:
            JobError: the job doesn't write for TensorBoard.
        """
        return self._writer(self)

    def stop(self, why: str = "") -> None:
        """End the training at this step, as if it were its last one: it is evaluated and saved.

        One rank's is enough, but for ``on_step`` and ``on_log``, which have to call it on all ranks
        alike.

        Args:
            why: is printed.
        """
        self.stopping = why

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode, without gradients, with the weights that are evaluated.

        Every rank calls this.
        """
        self._meet("training.evaluating()")
        with self._evaluated_weights(), self._step.evaluating():
            yield

    def weights(self) -> dict[str, Any]:
        """Return the model's state dict under its one-device names, not copied; on every rank."""
        self._meet("training.weights()")
        weights: dict[str, Any] = self._step.state_dict()["model"]
        return weights

    def _meet(self, call: str) -> None:
        """Make sure that every rank makes a call whose collectives would otherwise wait for ever.

        Raises:
            InputError: a rank doesn't.
        """
        self.world.meet(f"{call} in a callback", together=self._step.together)


class Callback:
    """Acts on a training, on every rank: ``Job(callbacks=[Mine()])``.

    Write the methods that you need; each is given the training (a ``TrainingContext``). They are
    called on every rank, at the same step, on a copy of the callback, which is made when the
    training begins. What they change (parameters, which of them are frozen, the optimizer's
    settings, attributes of the model) must be the same on all ranks: parameters that aren't are an
    error at the next log, evaluation or end of an epoch. Ranks of ``hogwild`` come to ``on_step`` each at its own
    time.

    Attributes:
        output: the file or folder in the run's that it writes, if it does; no other callback may
            write the same.
    """

    output: str | None = None

    needs_model: bool = True
    """Whether its methods use the model's parameters or the optimizer's state. ``fsdp`` gathers
    both, whole, on every rank while such a method runs. False leaves ``training.model`` and
    ``training.optimizer`` in shards.
    """

    def on_start(self, training: TrainingContext) -> None:
        """Act before the first step, also of a resumed run, whose state is there by then."""

    def on_step(self, training: TrainingContext) -> None:
        """Act after each update."""

    def on_log(self, training: TrainingContext) -> None:
        """Act when the training's losses are logged."""

    def on_epoch(self, training: TrainingContext) -> None:
        """Act after the training of an epoch, before the evaluation at its end.

        It isn't called for an epoch that ``steps`` or a stop cuts off.
        """

    def on_evaluated(self, training: TrainingContext) -> None:
        """Act after an evaluation; at the end of each epoch where there is no evaluation set."""

    def on_saved(self, training: TrainingContext) -> None:
        """Act after an epoch was saved."""

    def on_finish(self, training: TrainingContext) -> None:
        """Act at the end of the training, when the final weights are written, unless it fails."""

    @contextlib.contextmanager
    def evaluating(self, training: TrainingContext) -> Iterator[None]:
        """Surround each evaluation: other weights may be put in place, and must be put back."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: tensors, plain values, lists and dicts of them.

        The state of rank 0 is saved.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave.

        Tensors are on the CPU. It is called before ``on_start``.
        """
