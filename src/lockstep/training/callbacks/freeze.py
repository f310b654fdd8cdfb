"""Freezing parameters by name, from one step to another."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from lockstep.errors import JobError, nearest
from lockstep.training.callbacks.callback import Callback, TrainingContext


class Freeze(Callback):
    """Freezes parameters after ``start`` updates, and trains them again after ``until``.

    They have no gradients meanwhile, so that neither momentum nor weight decay moves them. Parameters that the model
    itself has frozen stay so. Running statistics of batch norms go on: freezing them takes ``eval()``.

    Args:
        names: of parameters or modules, or patterns of them: ``"encoder"``, ``"*.bias"``, or a list.
        start: updates before.
        until: updates after which they are trained again; None leaves them frozen.
    """

    def __init__(self, names: str | Sequence[str], *, start: int = 0, until: int | None = None) -> None:
        self._names = [names] if isinstance(names, str) else list(names)
        self._start, self._until = start, until
        self._parameters: list[nn.Parameter] = []

    def on_start(self, training: TrainingContext) -> None:
        """Find them.

        Raises:
            JobError: nothing has that name.
        """
        named = dict(training.model.named_parameters(remove_duplicate=False))
        for name in self._names:
            found = [p for full, p in named.items() if any(fnmatch.fnmatchcase(full, n) for n in (name, f"{name}.*"))]
            if not found:
                raise JobError(f'Freeze: the model has no parameter "{name}": {nearest(name, list(named))}')
            self._parameters += [p for p in found if p.requires_grad]
        self._set(training.step)

    def on_step(self, training: TrainingContext) -> None:
        """Freeze or train them, where that changes."""
        if training.step in (self._start, self._until):
            self._set(training.step)

    def _set(self, step: int) -> None:
        is_frozen = self._start <= step and (self._until is None or step < self._until)
        for p in self._parameters:
            p.requires_grad_(not is_frozen)
