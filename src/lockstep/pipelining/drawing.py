"""Drawing: whether a model draws random numbers in training. One that doesn't needs no streams for its micro-batches.

A stream sees every call of a PyTorch function, for 7 us and more of the interpreter, which the other stage waits for
too: 3 % of an update of small operators. A model that drew nothing in its first update goes without. Should it begin
to, its threads have drawn from one generator as they happened to come: that update's gradients are thrown away, and it
is computed once more, with streams, which it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lockstep.parallel import recompute

_checkpoints = 0


def _checkpointed() -> None:
    global _checkpoints
    _checkpoints += 1


class Drawing:
    """What the updates so far have shown of a model.

    Args:
        model: is only looked at.

    Attributes:
        expected: whether it may draw: before anything is known, and after it did. A model that writes its buffers
            counts too, because its updates can't be computed again; so does one with activation checkpoints, which set
            PyTorch's generator back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.expected = True
        self._has_drawn = False
        self._generator = torch.get_rng_state()
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self._values: list[torch.Tensor] | None = None
        self._checkpoints = 0
        recompute.install(_checkpointed)

    def look(self) -> None:
        """Something is going to be computed."""
        self._generator = torch.get_rng_state()
        self._checkpoints = _checkpoints
        self._buffers = [(buffer, buffer._version) for buffer in self._all_buffers()]
        if self.expected and not self._has_drawn:  # a kernel may write a buffer and not count it
            self._values = [buffer.detach().clone() for buffer, _ in self._buffers]

    def learn(self) -> None:
        """It was computed, by one thread alone."""
        self._has_drawn = self._has_drawn or self._drew() or self.wrote() or self._checkpoints != _checkpoints
        self.expected = self._has_drawn
        self._values = None

    def began(self) -> bool:
        """It was computed by several threads without streams: whether they drew; PyTorch's generator is as before."""
        self.expected = self._has_drawn = self._checkpoints != _checkpoints
        if not self._drew():
            return False
        torch.set_rng_state(self._generator)
        self.expected = self._has_drawn = True
        return True

    def wrote(self) -> bool:
        """Whether buffers have changed since ``look``."""
        now = list(self._all_buffers())
        if len(now) != len(self._buffers):
            return True
        if any(a is not b or a._version != version for a, (b, version) in zip(now, self._buffers, strict=True)):
            return True
        return self._values is not None and not all(map(torch.equal, now, self._values))

    def _drew(self) -> bool:
        return not torch.equal(torch.get_rng_state(), self._generator)

    def _all_buffers(self) -> Iterator[torch.Tensor]:
        return (b for module in self._model.modules() for b in module._buffers.values() if b is not None)
