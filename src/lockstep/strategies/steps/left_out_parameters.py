"""LeftOutParameters: frozen parameters that saved state leaves out, since the job builds them again.

Saved state has a checksum in the place of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint.weights import sum_in_place_of
from lockstep.errors import RunError
from lockstep.tensors.digest import digest
from lockstep.tensors.row_shard import RowShard

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step


class LeftOutParameters:
    """The parameters of a step that its saved state leaves out: at first none.

    Args:
        step: the step.

    Attributes:
        sums: what states have instead of each, by name.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.sums: dict[str, str] = {}
        self._digests: dict[str, Any] = {}

    def leave_out(self) -> None:
        """Leave the parameters that are frozen now out of all states; every rank calls this."""
        named = self._step.model.named_parameters(remove_duplicate=False)
        frozen = [name for name, p in named if not p.requires_grad]
        self.sums = {}
        self._digests = {}
        if not frozen:
            return
        own = self._step.layout.weights(whole=False)
        for name in frozen:
            self.sums[name] = self.sum_of(name, own[name])
            self._digests[name] = _digest(own[name])

    def sum_of(self, name: str, part: torch.Tensor | RowShard) -> str:
        """Compute the checksum of a parameter; every rank calls this.

        Args:
            name: of the parameter.
            part: what this rank has of the parameter.
        """
        if isinstance(part, RowShard):
            part = self._step.layout.joined(name, part.local)
        return sum_in_place_of(part)

    def check(self) -> None:
        """Refuse to save where parameters that are left out have changed.

        Raises:
            RunError: a parameter has changed, and would be lost.
        """
        if not self.sums:
            return
        own = self._step.layout.weights(whole=False)
        for name in self.sums:
            if _digest(own[name]) != self._digests[name]:
                raise RunError(
                    f'save_frozen: "{name}" was frozen when the training began, so that it is not '
                    "saved, and has other values now: leave save_frozen out"
                )


def _digest(part: torch.Tensor | RowShard) -> Any:
    local = part.local if isinstance(part, RowShard) else part
    return digest(local)
