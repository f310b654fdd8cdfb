"""Updates that are skipped: the loss counts nothing or, with ``nonfinite="skip"``, isn't finite.

All ranks decide by the same sums (total, count, gradients), which a NaN on any rank or replica
reaches, so they decide alike. Neither the optimizer nor fp16's scaler makes a step then. The batch
is consumed: the step is counted, and a scheduler of steps moves on. What forward wrote into buffers
(the running statistics of BatchNorm) stays.
"""

from __future__ import annotations

from lockstep.errors import NonFiniteLoss, RunError
from lockstep.launch.world import World
from lockstep.recipe import Recipe
from lockstep.run.events import Line

NO_ITEMS = "the loss counted no item in the batch"


class SkippedUpdates:
    """Counts the skipped updates, and ends a training with too many of them in a row.

    Attributes:
        number: how many there were, those before a resume included; under ``hogwild`` on this rank.
        in_a_row: how many there were since the last update that was made.
        nonfinite: whether losses and gradients that aren't finite are skipped.
    """

    def __init__(
        self,
        job: Recipe,
        world: World,
    ) -> None:
        self.number = 0
        self.in_a_row = 0
        self.nonfinite = job.nonfinite == "skip"
        self._limit = job.nonfinite_limit
        self._world = world

    @property
    def takes_nonfinite(self) -> bool:
        """Whether a loss that isn't finite would be skipped now."""
        return self.nonfinite and self.in_a_row < self._limit

    def add(
        self,
        why: str,
        step: int,
    ) -> None:
        """Count an update that is skipped, and log it.

        Raises:
            RunError: it counted no item, and as many as may be were skipped before it.
            NonFiniteLoss: likewise, and it isn't finite.
        """
        world = self._world
        if self.in_a_row >= self._limit:
            raise no_items(step, self.in_a_row) if why == NO_ITEMS else not_finite(why, step, world)
        self.number += 1
        self.in_a_row += 1
        place = "" if world.layout.together else f" on rank {world.rank}"
        if world.is_first or place:
            world.emit(Line.note(f"step {step}{place}: {why}, so the update is skipped"))

    def over_ranks(self) -> int:
        """Give the number for the whole training; every rank calls this."""
        if self._world.layout.together:
            return self.number
        return sum(self._world.gather_objects(self.number))

    def refuse_all(self) -> None:
        """Refuse a training in which every update was skipped.

        Raises:
            RunError: it has made no update.
        """
        if self._world.layout.together and 0 < self.number == self._world.step:
            raise RunError(
                f"all {self.number} updates were skipped: are all targets ignored, or NaN?"
            )


def no_items(step: int, skipped: int = 0) -> RunError:
    """Make the error of a batch whose loss counts no item.

    Args:
        step: the number of the update.
        skipped: the number of updates in a row that were skipped before.
    """
    before = f", and the {skipped} updates before it were skipped" if skipped else ""
    return RunError(
        f"step {step}: the loss counted 0 items in the batch{before}: are all targets ignored?"
    )


def not_finite(
    what: str,
    step: int,
    world: World,
) -> NonFiniteLoss:
    """Make the error of a loss or gradient that isn't finite, where the cause isn't known."""
    return NonFiniteLoss(
        f"{what} at step {step} on rank {world.rank} ({world.device}): "
        "look at that batch, try a smaller learning rate, or clip_norm"
    )
