"""Makes sure that what callbacks change is the same on every rank.

A rank whose callbacks have written a parameter in a step waits until every rank has written the
same (`World.meet`, by the store of the process group). So a write on some ranks only is found in
that step, and where nothing is written, nothing is sent. After steps 1, 2, 4, 8, ..., and between
epochs, the ranks also compare the settings of their optimizers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lockstep.errors import RunError
from lockstep.launch.world import END_OF_CALLBACKS
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.strategies.steps.step import Step
from lockstep.tensors.digest import digest


class RankAgreement:
    """Compares what callbacks change on the ranks of one training.

    Args:
        step: the model under its strategy.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._world = step.world
        # What is written to whole parameters of shards is compared where they are cut.
        parts = step.layout.parts()
        self._parameters = {
            name: parameter
            for name, parameter in step.model.named_parameters()
            if parts[name] is parameter
        }

    @contextlib.contextmanager
    def checked(self, *, within_epoch: bool) -> Iterator[None]:
        """Check what is changed in this context, which every rank enters.

        Raises:
            InputError: some ranks only have written a parameter.
            RunError: the ranks have changed something differently, or have written parameters that
                all of them share.
        """
        together = self._step.together
        compares = not within_epoch or (together and is_power_of_two(self._world.step))
        versions = {name: _version(p) for name, p in self._parameters.items()}
        settings = self._settings() if compares else {}

        yield

        changed: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            if _version(parameter) == versions[name]:
                continue
            if not together:
                raise RunError(
                    f'callbacks: parameter "{name}" was written, and all ranks share it, so that '
                    "each of them would write it: take ddp"
                )
            changed[f'parameter "{name}"'] = digest(parameter)

        if not compares:
            self._meet_over(changed)
            return

        for name, value in self._settings().items():
            if settings.get(name) != value:
                changed[f'"{name}"'] = value

        self._world.meet(END_OF_CALLBACKS, together=together)
        self._compare(changed)
        if within_epoch:
            self._step.after_events()

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the optimizer that are numbers or texts."""
        settings: dict[str, Any] = {}
        for i, group in enumerate(self._step.optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, int | float | str):
                    settings[f"{key} of optimizer group {i}"] = value
        return settings

    def _meet_over(self, changed: dict[str, Any]) -> None:
        """Wait for the ranks that have changed the same, if this rank has changed anything."""
        if not changed:
            return
        names = next(iter(changed))
        if len(changed) > 1:
            names += f" and {len(changed) - 1} more"
        values = hashlib.sha256(repr(changed).encode()).hexdigest()[:8]
        self._world.meet(f"what callbacks change ({names}, {values})")

    def _compare(self, changed: dict[str, Any]) -> None:
        """Compare what the ranks have changed.

        Raises:
            RunError: two ranks have changed something differently.
        """
        first, *others = self._world.gather_objects(changed)

        for rank, other in enumerate(others, start=1):
            for name in first | other:
                if first.get(name) != other.get(name):
                    raise RunError(
                        f"callbacks change {name} on rank 0 and rank {rank} differently: what they "
                        "change must be the same on every rank"
                    )


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    """Return what changes with each write to a parameter, but for writes to ``parameter.data``."""
    return parameter.data_ptr(), parameter._version
