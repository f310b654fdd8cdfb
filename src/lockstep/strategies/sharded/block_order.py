"""BlockOrder: the blocks that this rank comes to, in their order, which all ranks must share.

Each rank gathers a block's parameters when the block's forward begins. Ranks that come to different
blocks wait for one another, which the hang report explains, or compute with the parameters of
another block, which is found at the end of the update.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import StrategyError
from lockstep.launch.world import World


class BlockOrder:
    """Where forward has been on this rank; a ``StallCheck`` of the hang report.

    Args:
        world: the ranks.

    Attributes:
        order: a hash below 2^20 of the places in their order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._trail: list[str] = []
        self.order = 0
        world.stall_check = self

    def begin(self) -> None:
        """Forget the last update, or the last batch of an evaluation."""
        self._trail.clear()
        self.order = 0

    def come_to(self, place: str, number: int) -> None:
        """Note that forward comes to a place, which has this number on all ranks."""
        self.order = hash((self.order, number)) % 2**20
        self._trail.append(place)

    def refuse_others(self, orders: float, squares: float) -> None:
        """Make sure that all ranks have come to the same blocks, in the same order.

        Args:
            orders: the sum over the ranks of ``order``.
            squares: the sum of the squares.

        Raises:
            StrategyError: they haven't, and have computed with the parameters of other blocks.
        """
        if self._world.size * int(squares) != int(orders) ** 2:
            raise _other_blocks(
                "ranks called different blocks in this update, or the same blocks in another order"
            )

    def notes(self) -> list[str]:
        """Return the blocks that this rank has come to in this update."""
        return self._trail.copy()

    def refusal(self, notes: Mapping[int, list[str]]) -> StrategyError | None:
        """Return an error where ranks have come to different blocks, not where one is behind."""
        for places in zip(*notes.values(), strict=False):
            if len(set(places)) > 1:
                by_rank = zip(notes, places, strict=True)
                each = [f"in {place} on rank {rank}" for rank, place in by_rank]
                return _other_blocks(f"forward is {', '.join(each)}")
        return None


def _other_blocks(what: str) -> StrategyError:
    """Return the refusal of a model in which ranks gather different blocks."""
    return StrategyError(
        f"fsdp: {what}: blocks that depend on the samples can't be gathered on their own",
        fix='name the other blocks: --blocks NAMES, or FSDP(blocks=...); blocks="" gathers the '
        "whole model at once",
    )
