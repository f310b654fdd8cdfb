"""Chunks: what one device does for a parallel loss, so that the logits of a large vocabulary never
exist whole.

::

    hidden (batch, time, width)  ──generator──criterion──backward──▶  gradient of the chunk, added to the generator's
      |  0..c  |  c..2c |  ...      one chunk of c time steps after the other; the logits of only one exist

Forward and backward of a chunk are done at once, before the loss as a whole is known: gradients of
the sum, which the parallel loss scales when its own gradient comes. Computing the logits again in
backward instead would need less memory still (no gradient of the weights between forward and
backward), and a third more time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.launch.devices import Device
from lockstep.model.losses.torch_losses import Count
from lockstep.parallel.loss.token_loss import Criterion
from lockstep.tensors import pytree


@dataclass
class Share:
    """A device's part of the batch, and what it does with it.

    Attributes:
        outputs: hidden states (batch, time, width) or (batch, width); without a generator, any
            nesting.
        targets: a nest of tensors (batch, time, ...), or what the criterion takes.
        steps: time steps of a chunk; None takes all of it at once, as it is.
        count: as given by the person.
        generator: this device's replica, whose parameters are leaves; None takes the outputs as
            they are.
    """

    device: Device
    outputs: Any
    targets: Any
    criterion: Criterion
    steps: int | None
    count: Count | None
    generator: nn.Module | None = None

    def work(self, learns: bool) -> tuple[Tensor | None, Count, list[Tensor | None]]:
        """Give total, count, and the gradient of the total for each tensor of the outputs; that of
        weights is in ``.grad``.

        The total is None where there is no token. Without ``learns`` there are no gradients.

        Raises:
            InputError: something else than the generator and its input would get gradients too.
        """
        weights: list[Tensor] = []
        if learns and self.generator is not None:
            weights += [one for one in self.generator.parameters() if one.requires_grad]

        def leaf_of(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(learns and tensor.requires_grad)

        leaves = pytree.each(leaf_of, self.outputs)
        total: Tensor | None = None
        count: Count = 0
        with torch.set_grad_enabled(learns):
            for outputs, targets in self._chunks(leaves):
                # (No name holds on to the logits while backward runs.)
                found, items = self.criterion(self._generated(outputs), targets, self.count)
                if found.requires_grad:
                    _refuse_others(found, [*pytree.tensors(outputs), *weights])
                    found.backward()  # type: ignore[no-untyped-call]
                found = found.detach()
                if total is not None:
                    found = total + found
                total = found
                count = count + items
        return total, count, [leaf.grad for leaf in pytree.tensors(leaves)]

    def _chunks(self, leaves: Any) -> Iterator[tuple[Any, Any]]:
        """Yield outputs and targets as rows. What backward finds for a chunk comes to its place in the
        whole gradient.
        """
        if self.steps is None:
            yield leaves, self.targets
            return
        if leaves.requires_grad:
            leaves.grad = torch.zeros_like(leaves, memory_format=torch.contiguous_format)
        for start in range(0, leaves.shape[1], self.steps):
            place = slice(start, start + self.steps)
            chunk = leaves.detach()[:, place].requires_grad_(leaves.requires_grad)
            yield chunk, pytree.each(lambda t: _rows(t, place), self.targets)  # noqa: B023
            if chunk.grad is not None:
                leaves.grad[:, place] = chunk.grad

    def _generated(self, hidden: Any) -> Any:
        """Compute logits (rows, vocabulary) of hidden states (batch, time, width) or (batch, width)."""
        if self.generator is None:
            return hidden if self.steps is None else hidden.flatten(0, 1)
        return self.generator(hidden).flatten(0, -2)


def _rows(tensor: Tensor, place: slice) -> Tensor:
    """Flatten time steps of (batch, time, ...) to (batch x steps, ...)."""
    if tensor.dim() < 2:
        return tensor
    return tensor[:, place].flatten(0, 1)


def _refuse_others(total: Tensor, known: list[Tensor]) -> None:
    """Refuse a graph that reaches other leaves: their gradients would come unscaled, or not at
    all.
    """
    own = {id(tensor) for tensor in known}
    for node in pytree.graph_nodes(total):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise InputError(
                f"a tensor {tuple(leaf.shape)} that wants gradients is used by the loss, and is "
                "neither a parameter of the generator nor its input: make it a parameter of the "
                "generator, or detach it"
            )
