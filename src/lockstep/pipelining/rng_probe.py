"""Drawing: whether a model draws random numbers in training. One that doesn't needs no streams for its micro-batches.

A stream sees every call of a PyTorch function, for 7 us and more of the interpreter, which the other stage waits for
too: 3 % of an update of small operators. A model that drew nothing in its first update goes without. Should it begin
to, its threads have drawn from one generator as they happened to come: that update's gradients are thrown away, and it
is computed once more, with streams, which it keeps.

No stream gives what is drawn in backward (the autograd engine runs functions without a thread's modes), by operators
that aren't PyTorch's own, and from Python's or numpy's random. A model that draws such numbers has its micro-batches
one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lockstep.tensors.seeding import noted_seeding, other_states, same_others, set_other_states
from lockstep.threads import recompute

_CHANCE = "in an order that would be left to chance"

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
        self._in_backward = self._seeds = False
        self.look()
        recompute.install(_checkpointed)

    @property
    def expected(self) -> bool:
        """Whether it may draw: before anything is known, and after it did."""
        return self._has_drawn is not False

    def look(self) -> None:
        """Something is going to be computed."""
        self._generator = torch.get_rng_state()
        self._others = other_states()
        self._checkpoints = _checkpoints

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """What a forward, by one thread alone, runs in."""
        with noted_seeding() as seeds:
            yield
        self._seeds |= bool(seeds)
        self._turned = torch.get_rng_state()

    def learn(self) -> None:
        """Its backward too."""
        self._in_backward |= not torch.equal(torch.get_rng_state(), self._turned)
        self._has_drawn = bool(self._has_drawn) or self._drew() or self._checkpoints != _checkpoints

    def began(self) -> bool:
        """It was computed by several threads without streams: whether they drew; PyTorch's generator is as before."""
        drew = self._drew()
        if drew:
            torch.set_rng_state(self._generator)
        self._has_drawn = drew or self._checkpoints != _checkpoints
        return drew

    def why_in_turn(self) -> str | None:
        """After what one thread computed alone: why micro-batches can't overlap, or None."""
        if self._seeds:
            return "forward seeds PyTorch's generator, which is one for all micro-batches"
        return f"backward draws random numbers, {_CHANCE}" if self._in_backward else None

    def strayed(self, *, streamed: bool) -> str | None:
        """It was computed by several threads: what they drew that no stream gives; all generators are as before.

        Args:
            streamed: with seeded streams, so that nothing that those see moves PyTorch's generator.
        """
        if not same_others(self._others, other_states()):
            set_other_states(self._others)
            torch.set_rng_state(self._generator)
            return f"forward draws from Python's or numpy's random, {_CHANCE}"
        if streamed and self._drew():
            torch.set_rng_state(self._generator)
            return f"backward, or an operator that isn't PyTorch's own, draws random numbers, {_CHANCE}"
        return None

    def _drew(self) -> bool:
        return not torch.equal(torch.get_rng_state(), self._generator)
