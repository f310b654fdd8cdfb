"""Freezing parameters by name, from one step to another."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Sequence

from torch import nn

from lockstep.errors import JobError, nearest
from lockstep.training.callbacks.callback import Callback, TrainingContext

_frozen_by: weakref.WeakKeyDictionary[TrainingContext, dict[int, set[int]]] = (
    weakref.WeakKeyDictionary()
)
"""In each training, for each parameter that callbacks freeze, those that do so now; all by their
ids.
"""


class Freeze(Callback):
    """Freezes parameters after ``start`` updates, and trains them again after ``until``.

    They have no gradients meanwhile, so that neither momentum nor weight decay moves them.
    Parameters that the model itself has frozen stay so. Of several callbacks that have the same
    ones, each freezes them for its steps. Running statistics of batch norms go on: freezing them
    takes ``eval()``.

    Args:
        names: of parameters or modules, or patterns of them: ``"encoder"``, ``"*.bias"``, or a
            list.
        start: updates before.
        until: updates after which they are trained again; None leaves them frozen.
    """

    def __init__(
        self, names: str | Sequence[str], *, start: int = 0, until: int | None = None
    ) -> None:
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
            found = [
                p
                for full, p in named.items()
                if any(fnmatch.fnmatchcase(full, n) for n in (name, f"{name}.*"))
            ]
            if not found:
                raise JobError(
                    f'Freeze: the model has no parameter "{name}": {nearest(name, list(named))}'
                )
            by = _frozen_by.setdefault(training, {})
            mine = [p for p in found if p.requires_grad or id(p) in by]
            for p in mine:
                by.setdefault(id(p), set())
            self._parameters += mine
        self._set(training)

    def on_step(self, training: TrainingContext) -> None:
        """Freeze or train them, where that changes."""
        if training.step in (self._start, self._until):
            self._set(training)

    def _set(self, training: TrainingContext) -> None:
        is_frozen = self._start <= training.step and (
            self._until is None or training.step < self._until
        )
        for p in self._parameters:
            by = _frozen_by[training][id(p)]
            by.add(id(self)) if is_frozen else by.discard(id(self))
            p.requires_grad_(not by)
