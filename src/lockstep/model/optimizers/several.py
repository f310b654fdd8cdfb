"""Several optimizers of a job as one: each over a part of the model, by the name of that part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Optimizers by name; ``step()`` is that of the ``active`` one.

    Args:
        by_name: each over the parameters of the model's part of that name.

    Attributes:
        by_name: likewise.
        active: the name of the one that makes the next step.
    """

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        # PyTorch's __init__ is not called: groups and state are those of the parts, which
        # schedulers change.
        self.by_name = dict(by_name)
        self.active = next(iter(by_name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, one after the other."""
        return [group for one in self.by_name.values() for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of all parameters."""
        return {key: value for one in self.by_name.values() for key, value in one.state.items()}

    def step(self, closure: Any = None) -> Any:
        """Make a step of the active optimizer."""
        return self.by_name[self.active].step(closure)


def optimizers_in(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """List the optimizers that ``Optimizers`` has, or the one optimizer itself."""
    if isinstance(optimizer, Optimizers):
        return list(optimizer.by_name.values())
    return [optimizer]
