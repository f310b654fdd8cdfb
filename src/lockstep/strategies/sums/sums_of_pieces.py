"""What is summed over the parts of a batch: the loss of a model, with its parts, and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.model.losses.loss import Number, Totalled, total_of_items
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


@dataclass(frozen=True)
class PieceSums:
    """What a model, or its loss, came to for some samples.

    Attributes:
        total: what backward runs on; None where there are no gradients to compare.
        count: the number of items of that total.
        named: totals and counts, by what they are of.
    """

    total: Tensor | None
    count: Number
    named: Mapping[str, tuple[Number, Number]]

    def numbers(self) -> dict[str, float]:
        """Totals and counts by name."""
        found = {}
        for name, (total, count) in self.named.items():
            found[f"the total of {name}"] = float(total_of_items(total, count))
            found[f"the count of {name}"] = float(count)
        return found


class Summed(ABC):
    """What has to be the same sums for a batch as for its parts.

    Attributes:
        model: the model.
        holds: objects beside the model that may have state.
        trains: whether gradients are compared.
    """

    model: nn.Module
    holds: Sequence[Any] = ()
    trains = True

    @abstractmethod
    def __call__(self, piece: Piece) -> PieceSums:
        """Compute the sums of a piece."""

    def outputs(self, piece: Piece) -> Any:
        """Call the model as for the sums."""
        return self(piece)

    def explained(self, piece: Piece) -> LossError | None:
        """Give an error where the loss is no sum over samples of these outputs."""
        del piece
        return None


class SummedLoss(Summed):
    """The loss of a model, with its parts, and metrics beside it.

    Args:
        model: the model.
        loss: gives total and count.
        metrics: gives the total and count of each metric, by name, for outputs and targets.
        trains: whether gradients are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Totalled,
        *,
        metrics: Metrics | None = None,
        trains: bool = True,
    ) -> None:
        self.model = model
        self.holds = [loss.loss]
        self.trains = trains
        self._loss = loss
        self._metrics = metrics

    def __call__(self, piece: Piece) -> PieceSums:
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
        has_gradient = self.trains and loss.total.requires_grad
        return PieceSums(loss.total if has_gradient else None, loss.count, named)

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
                return self._refused(outputs, piece)
        except LossError as error:
            return error
        except RuntimeError:  # a loss may need gradients
            return None

    def _refused(self, outputs: Any, piece: Piece) -> LossError | None:
        whole = self._loss(outputs, clones(piece.targets), piece.size)
        mean = mean_of(outputs) if self._loss.counts is None else None
        if mean is not None and torch.allclose(whole.total, mean.to(whole.total) * piece.size):
            return LossError(
                f"{self._loss.name} is outputs.loss, the model's mean over its labels, and parts "
                "of a batch have different numbers of labels",
                fix="take loss=lockstep.model_loss, which weights it by the number of labels",
            )
        check = LossCheck(self._loss, cuts=True)
        check(outputs, piece.targets, whole, piece.size, step=0)
        return None
