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

from lockstep.tensors.seeding import noted_seeding, same_others, set_other_states, states
from lockstep.threads import recompute

_OTHERS = "forward draws from Python's or numpy's random"
_CHANCE = ", in an order that would be left to chance"


class Drawing:
    """What the updates so far have shown of a model.

    Attributes:
        expected: whether it may draw: before anything is known, and after it did. A model with activation checkpoints
            is taken for one that draws: each sets PyTorch's generator back.
        why_in_turn: what it drew that no stream gives, or None.
    """

    def __init__(self) -> None:
        self.expected = True
        self.why_in_turn: str | None = None
        self._drew = False
        recompute.install()
        self.look()

    def look(self) -> None:
        """Something is going to be computed."""
        self._before = states()
        self._checkpoints = recompute.checkpoints()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """What a forward, by one thread alone, runs in."""
        with noted_seeding() as seeds:
            yield
        self._turned = torch.get_rng_state()
        if seeds:
            self.why_in_turn = "forward seeds PyTorch's generator, which is one for all micro-batches"

    def learn(self) -> None:
        """Its backward is over too."""
        now = states()
        if not torch.equal(now.torch, self._turned):
            self.why_in_turn = f"backward draws random numbers{_CHANCE}"
        elif not same_others(now.others, self._before.others):
            self.why_in_turn = f"{_OTHERS}{_CHANCE}"
        self._drew = self._drew or self._has_moved() or self._checkpoints != recompute.checkpoints()
        self.expected = self._drew

    def strayed(self, *, streamed: bool, seeded: bool) -> bool:
        """Several threads have computed it: whether they drew what no stream gave; then all generators are as before.

        Args:
            streamed: with streams, so that nothing that those see moves PyTorch's generator.
            seeded: the streams have seeds of their own, which they don't draw from it.
        """
        others = not same_others(states().others, self._before.others)
        drew = (seeded or not streamed) and self._has_moved()
        self.expected = self.expected or drew or self._checkpoints != recompute.checkpoints()
        if others:
            self.why_in_turn = f"{_OTHERS}{_CHANCE}"
        elif drew and streamed:
            self.why_in_turn = f"backward, or an operator that isn't PyTorch's own, draws random numbers{_CHANCE}"
        if others or drew:
            torch.set_rng_state(self._before.torch)
            set_other_states(self._before.others)
        return others or drew

    def _has_moved(self) -> bool:
        return not torch.equal(torch.get_rng_state(), self._before.torch)
