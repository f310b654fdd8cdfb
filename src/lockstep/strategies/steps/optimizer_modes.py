"""Optimizers with ``train()`` and ``eval()``, which evaluate other weights than they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lockstep.model.optimizers.kinds import with_modes

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step


class OptimizerModes:
    """Puts an optimizer into its mode for training or evaluation, if it has any.

    Args:
        step: has the optimizer.

    Attributes:
        optimizers: those that have modes.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.optimizers = with_modes(step.optimizer)
        self._evaluates = False

    def train(self) -> None:
        """Give the model the weights that are trained."""
        for optimizer in self.optimizers:
            optimizer.train()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the weights of the optimizer's ``eval()`` for a while.

        What is written to parameters meanwhile stays. ``train()`` gives the others their values
        back but for rounding, so they are given the same bits: neither evaluations nor callbacks
        change a result, and a resumed run goes on as one that was not interrupted.
        """
        if not self.optimizers or self._evaluates:
            yield
            return
        before = {p: p.detach().clone() for p in self._step.layout.parts().values()}
        for optimizer in self.optimizers:
            optimizer.eval()
        # Nothing changes where a person has called eval(), who then calls train() too.
        versions = {p: p._version for p, value in before.items() if not torch.equal(p, value)}
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False
            unwritten = [p for p, version in versions.items() if p._version == version]
            if versions:
                self.train()
            with torch.no_grad():
                for p in unwritten:
                    p.copy_(before[p])
