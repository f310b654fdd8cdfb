"""What is summed over the parts of a batch: the loss of a model, with its parts, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.model.losses.loss import Loss, Number, Totalled
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

    def __init__(
        self,
        model: nn.Module,
        holds: Sequence[Any],
    ) -> None:
        self.model = model
        self.holds = holds

    def __call__(self, piece: Piece) -> Loss:
        """Compute what backward runs on, with its count; totals and counts of all sums as parts."""
        raise NotImplementedError

    def outputs(self, piece: Piece) -> Any:
        """Call the model as for the sums."""
        return self(piece)


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
