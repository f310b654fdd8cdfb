"""Drawing: whether a model draws random numbers in training. One that doesn't needs no streams for its micro-batches.

A stream sees every call of a PyTorch function, for 7 us and more of the interpreter, which the other stage waits for
too: 3 % of an update of small operators. A model that drew nothing in its first update goes without. Should it begin
to, its threads have drawn from one generator as they happened to come: that update's gradients are thrown away, and it
is computed once more, with streams, which it keeps.
"""

from __future__ import annotations

import torch

from lockstep.parallel import recompute

_checkpoints = 0


def _checkpointed() -> None:
    global _checkpoints
    _checkpoints += 1


class Drawing:
    """What the updates so far have shown of a model.

    A model with activation checkpoints is taken for one that draws: each sets PyTorch's generator back.
    """

    def __init__(self) -> None:
        self._has_drawn: bool | None = None
        self._generator = torch.get_rng_state()
        self._checkpoints = _checkpoints
        recompute.install(_checkpointed)

    @property
    def expected(self) -> bool:
        """Whether it may draw: before anything is known, and after it did."""
        return self._has_drawn is not False

    def look(self) -> None:
        """Something is going to be computed."""
        self._generator = torch.get_rng_state()
        self._checkpoints = _checkpoints

    def learn(self) -> None:
        """It was computed, by one thread alone."""
        self._has_drawn = bool(self._has_drawn) or self._drew() or self._checkpoints != _checkpoints

    def began(self) -> bool:
        """It was computed by several threads without streams: whether they drew; PyTorch's generator is as before."""
        drew = self._drew()
        if drew:
            torch.set_rng_state(self._generator)
        self._has_drawn = drew or self._checkpoints != _checkpoints
        return drew

    def _drew(self) -> bool:
        return not torch.equal(torch.get_rng_state(), self._generator)
