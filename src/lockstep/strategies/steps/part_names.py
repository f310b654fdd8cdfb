"""PartNames: the names of the parts of a loss, which all ranks have to know."""

from __future__ import annotations

import itertools

from lockstep.errors import LossError
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Totalled


class PartNames:
    """The names of the parts of a loss, which the ranks agree on in the first update.

    Args:
        world: the ranks.
        loss: of the job.

    Attributes:
        known: the names; None before the first update, and where ranks don't meet.
    """

    def __init__(self, world: World, loss: Totalled) -> None:
        self._world = world
        self._loss = loss
        self.known: tuple[str, ...] | None = None

    def of(self, loss: Loss) -> tuple[str, ...]:
        """Give the names of the parts that the loss of any rank had in the first update.

        Raises:
            LossError: ``loss`` has another part, which the other ranks don't have.
        """
        if self.known is None:
            names = list(loss.parts)
            if not self._world.layout.together:
                return tuple(names)
            if not self._loss.is_known:  # PyTorch's losses have no parts, on any rank
                names = list(itertools.chain(*self._world.gather_objects(names)))
            self.known = tuple(dict.fromkeys(names))
        new = sorted(set(loss.parts).difference(self.known))
        if new:
            raise LossError(
                f'{self._loss.name}: part "{new[0]}" is new in step {self._world.step}, and no '
                "batch had it before",
                fix="give each part from the first update on, as (0.0, 0) where a batch has "
                "nothing of it",
            )
        return self.known
