"""What each rank has of the parameters of a model, their gradients and optimizer state: here all
of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.model.optimizers.state import load_named_optimizer_state, named_optimizer_state
from lockstep.tensors.row_shard import RowShard


class ParameterLayout:
    """Every rank has whole parameters. Layouts of shards override what differs.

    Names are those of the single-device model. All methods but ``parts`` are called on every rank.

    Args:
        model: the model of this process.
        optimizer: its optimizer.
    """

    keeps_shards = False
    """Whether this rank has only some rows of parameters, which it writes to a checkpoint itself
    where it can.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    # ---- contexts --------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """The model and the optimizer have whole parameters in this context."""
        return nullcontext()

    def read(self) -> AbstractContextManager[None]:
        """The model has whole parameters in this context; what is written to them is lost."""
        return nullcontext()

    def own(self) -> AbstractContextManager[None]:
        """The model has what this rank keeps of it in this context, within ``whole`` too."""
        return nullcontext()

    # ---- single tensors --------------------------------------------------------------------------

    def parts(self) -> dict[str, torch.Tensor]:
        """By name, what this process has of each parameter."""
        return dict(self._model.named_parameters())

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this process has of a tensor of the shape of a parameter, or of a buffer."""
        del name
        return whole

    def joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Join the parts that the ranks have of a tensor."""
        del name
        return part

    def rows(self, name: str, part: torch.Tensor) -> torch.Tensor | RowShard:
        """Return the whole tensor, or the rows of it that this rank has."""
        del name
        return part

    def split(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """Return how many rows of a tensor of a checkpoint each rank has, and this rank's number;
        None where each has all of it.
        """
        del name, shape
        return None

    # ---- all of them -----------------------------------------------------------------------------

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters by name."""
        return {name: self.joined(name, p) for name, p in self.parts().items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradients, as far as there are any, by the names of their parameters."""
        found = {}
        for name, p in self.parts().items():
            if p.grad is not None:
                found[name] = self.joined(name, p.grad)
        return found

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's state dict.

        Args:
            whole: False gives this rank's rows (`RowShard`) of a tensor whose rows are shared out.
        """
        del whole
        weights: dict[str, Any] = self._model.state_dict()
        return weights

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over what ``weights`` gave."""
        self._model.load_state_dict(weights)

    def optimizer_state(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the optimizer's state by parameter name; ``whole`` as in ``weights``."""
        del whole
        return named_optimizer_state(self._optimizer, self._model)

    def take_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``optimizer_state`` gave."""
        load_named_optimizer_state(self._optimizer, self._model, saved)
