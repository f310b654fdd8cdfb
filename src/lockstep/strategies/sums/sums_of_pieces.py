"""What is summed over the parts of a batch: the loss of a model, with its parts, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import LossError
from lockstep.model.losses.loss import Loss, Number, Totalled
from lockstep.model.losses.loss_check import LossCheck
from lockstep.model.losses.model_loss import mean_of
from lockstep.tensors.pytree import call, clones, doubled

Metrics = Callable[[Any, Any], Mapping[str, tuple[Number, Number]]]
"""Gives totals and counts by name, for outputs and targets."""


@dataclass(frozen=True)
class Piece:
    """Samples that are computed together: the whole, or a part of it, which begins with its
    sample ``start``.
    """

    inputs: Any
    targets: Any
    size: int
    start: int = 0

    def doubled(self) -> Piece:
        """Return these samples in float64."""
        return Piece(doubled(self.inputs), doubled(self.targets), self.size, self.start)


class Summed:
    """What has to be the same sums for a batch as for its parts.

    Attributes:
        model: the model.
        holds: objects beside the model that may have state.
        trains: whether gradients are compared.
    """

    trains = True

    def __init__(self, model: nn.Module, holds: Sequence[Any]) -> None:
        self.model = model
        self.holds = holds

    def __call__(self, piece: Piece) -> Loss:
        """Compute what backward runs on, with its count; totals and counts of all sums as parts."""
        raise NotImplementedError

    def outputs(self, piece: Piece) -> Any:
        """Call the model as for the sums."""
        return self(piece)

    def explained(self, piece: Piece) -> LossError | None:
        """Give an error where the loss is no sum over samples of these outputs."""


class SummedLoss(Summed):
    """The loss of a model, with its parts, and metrics beside it.

    Args:
        model: the model.
        loss: gives total and count.
        metrics: gives the total and count of each metric, by name, for outputs and targets; None
            compares the gradients of a training instead.
        holds: what metrics hold.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Totalled,
        metrics: Metrics | None = None,
        holds: Sequence[Any] = (),
    ) -> None:
        super().__init__(model, [loss.loss, *holds])
        self.trains = metrics is None
        self._loss = loss
        self._metrics = metrics

    def __call__(self, piece: Piece) -> Loss:
        """Compute the sums of a piece."""
        outputs = self.outputs(piece)
        targets = clones(piece.targets)  # which may be written to
        loss = self._loss(outputs, targets, piece.size)
        named = {"the loss": (loss.total.detach(), loss.count)}
        for name, part in loss.parts.items():
            named[f'part "{name}" of the loss'] = part
        if self._metrics is not None:
            for name, pair in self._metrics(outputs, piece.targets).items():
                named[f'metric "{name}"'] = pair
        return Loss(loss.total, loss.count, named)

    def outputs(self, piece: Piece) -> Any:
        """Call the model."""
        return call(self.model, clones(piece.inputs))

    def explained(self, piece: Piece) -> LossError | None:
        """Give the error of a loss that is no sum over samples of these outputs."""
        if self._loss.is_known:
            return None
        outputs = self.outputs(piece)
        try:
            with torch.no_grad():
                whole = self._loss(outputs, clones(piece.targets), piece.size)
                mean = mean_of(outputs) if self._loss.counts is None else None
                if mean is None or not torch.allclose(
                    whole.total, mean.to(whole.total) * piece.size
                ):
                    check = LossCheck(self._loss, cuts=True)
                    check(outputs, piece.targets, whole, piece.size, step=0)
                    return None
        except LossError as error:
            return error
        except RuntimeError:  # a loss may need gradients
            return None
        return LossError(
            f"{self._loss.name} is outputs.loss, the model's mean over its labels, and parts of a "
            "batch have different numbers of labels",
            fix="take loss=lockstep.model_loss, which weights it by the number of labels",
        )
