"""Freezing parameters by name, from one step to another."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from lockstep.errors import JobError, nearest
from lockstep.training.callbacks.callback import Callback, TrainingContext


class Freeze(Callback):
    """Freezes parameters after ``start`` updates, and trains them again after ``until``.

    They have no gradients meanwhile, so that neither momentum nor weight decay moves them.
    Parameters that the model itself has frozen stay so. Of several callbacks that have the same
    ones, each freezes them for its steps. Running statistics of batch norms go on: freezing them
    takes ``eval()``::

        callbacks = [Freeze("encoder", until=500), Freeze("*.bias")]

    Args:
        names: of parameters or modules, or patterns of them: ``"encoder"``, ``"*.bias"``, or a
            list.
        start: updates before.
        until: updates after which they are trained again; None leaves them frozen.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        *,
        start: int = 0,
        until: int | None = None,
    ) -> None:
        self._names = [names] if isinstance(names, str) else list(names)
        self._start = start
        self._until = until
        self._parameters: list[nn.Parameter] = []

    def on_start(self, training: TrainingContext) -> None:
        """Find the parameters, and freeze them if that is due.

        Raises:
            JobError: nothing has that name.
        """
        named = dict(training.model.named_parameters(remove_duplicate=False))

        for name in self._names:
            is_there = False
            for full, parameter in named.items():
                if not _matches(full, name):
                    continue
                is_there = True
                if parameter.requires_grad or parameter in training.frozen_by:
                    self._parameters.append(parameter)
                    training.frozen_by.setdefault(parameter, set())
            if not is_there:
                raise JobError(
                    f'Freeze: the model has no parameter "{name}": {nearest(name, list(named))}'
                )

        self._set(training)

    def on_step(self, training: TrainingContext) -> None:
        """Freeze or train them, where that changes."""
        if training.step in (self._start, self._until):
            self._set(training)

    def _set(self, training: TrainingContext) -> None:
        """Freeze each parameter that this callback, or another one, freezes at this step."""
        is_over = self._until is not None and training.step >= self._until

        for parameter in self._parameters:
            callbacks = training.frozen_by[parameter]
            if training.step >= self._start and not is_over:
                callbacks.add(self)
            else:
                callbacks.discard(self)
            parameter.requires_grad_(not callbacks)


def _matches(full: str, pattern: str) -> bool:
    """Return whether a parameter has that name, or is in a module of that name."""
    if fnmatch.fnmatchcase(full, pattern):
        return True
    return fnmatch.fnmatchcase(full, f"{pattern}.*")
