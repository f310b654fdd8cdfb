"""The losses of a step function: what its calls of ``update`` give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.errors import LossError
from lockstep.launch.processes.pickling import closed_over
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.losses.torch_losses import HALF
from lockstep.strategies.sums.sums_of_pieces import Piece, PieceSums, Summed
from lockstep.tensors.pytree import clones

StepFunction = Callable[..., None]
"""``step(models, batch, update)``"""


class Update:
    """The argument that a step function calls: ``update("generator", total, count)``.

    Args:
        take: is called with each name and its loss.
        step: see below.
        samples: see below.

    Attributes:
        step: the number of this step, from 1, the same on every device.
        samples: of the global batch.
    """

    def __init__(self, take: Callable[[str, Loss], None], step: int, samples: int) -> None:
        self._take = take
        self.step = step
        self.samples = samples

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        """Make one step of the optimizer of that name.

        Args:
            name: of the optimizer, and of the part of the model that it moves.
            total: the sum of the loss over items, a scalar tensor.
            count: the number of items; a loss without it is refused.

        Raises:
            InputError: there is no such optimizer, or the replicas make different calls.
            LossError: the total is no scalar, has no count, or doesn't depend on the parameters of
                that part.
        """
        self._take(name, _as_loss(name, total, count))


def _as_loss(name: str, total: Any, count: Any) -> Loss:
    """Make a loss of the arguments of ``update``.

    Raises:
        LossError: the total is no scalar tensor, the count is no number, or there is no count.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        what = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            what = f"of shape {tuple(total.shape)}"
        raise LossError(f'update("{name}"): the loss is {what}, a scalar tensor is expected')
    if count is None:
        raise LossError(
            f'update("{name}"): the count is missing: give the sum over items, and the number of '
            f'items: update("{name}", total, count)'
        )
    if isinstance(count, torch.Tensor):
        is_number = not count.dim() and not count.requires_grad
    else:
        is_number = isinstance(count, int | float)
    if not is_number:
        raise LossError(f'update("{name}"): the count is {count!r}, a number of items is expected')
    if total.dtype in HALF:
        total = total.float()
    return Loss(total, count)


class SummedFunction(Summed):
    """The losses of a step function, which makes no update with them.

    Args:
        model: the model.
        function: the step function.
        step: the number of the step.
        samples: of the global batch.
    """

    def __init__(self, model: nn.Module, function: StepFunction, step: int, samples: int) -> None:
        self.model = model
        self.holds = [function, *closed_over(function)]
        self._function = function
        self._step = step
        self._samples = samples

    def __call__(self, piece: Piece) -> PieceSums:
        """Run the function on a piece."""
        named: dict[str, tuple[Number, Number]] = {}
        sums: list[torch.Tensor] = []
        counts: set[float] = set()

        def take(name: str, loss: Loss) -> None:
            call = f'update("{name}"), call {len(named) + 1}'
            named[call] = (loss.total.detach(), loss.count)
            counts.add(float(loss.count))
            if loss.total.requires_grad:
                sums.append(loss.total)

        batch = clones((piece.inputs, piece.targets))
        self._function(self.model, batch, Update(take, self._step, self._samples))
        count: Number = piece.size
        if len(counts) == 1:
            # One device has the mean over what is counted, which only losses of one count share.
            count = counts.pop()
        total = None
        if sums:
            total = torch.stack(sums).sum()
        return PieceSums(total, count, named)
