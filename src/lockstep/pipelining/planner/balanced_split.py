"""The split: which run of blocks makes which stage. Exact, by a dynamic program over the order of
execution.

::

    best[s][j]  =  min over i < j of  max(best[s-1][i], time of blocks i to j-1)  s stages, the first j blocks

The slowest stage sets the pace of a pipeline, so the split with the fastest slowest stage is the
best one. Among splits that are as fast (within ``slack``) the one is taken whose cuts send the
fewest bytes on: between two residual blocks rather than inside of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from lockstep.errors import StrategyError, TooFewLayers, counted
from lockstep.pipelining.planner.blocks import Block
from lockstep.tensors.byte_size import size

Need = Callable[[int, Sequence[Block]], float]
"""(stage, its blocks) -> bytes."""

Cost = tuple[float, float]
"""Compared by the first number, and where that is equal by the second."""


def split(
    blocks: Sequence[Block],
    stages: int,
    *,
    need: Need = lambda stage, run: 0.0,
    capacity: Sequence[float] | None = None,
    devices: Sequence[str] = (),
    slack: float = 0.0,
) -> list[int]:
    """Find where each stage begins: its first block's place, for every stage, and the number of
    blocks at the end.

    Args:
        blocks: in the order of execution.
        stages: how many runs of them, none empty.
        need: the bytes that a stage needs.
        capacity: of each stage's device, in bytes; None doesn't look at memory.
        devices: their names, for messages.
        slack: how much slower than the fastest the slowest stage may be for fewer bytes to cross,
            as a share.

    Raises:
        TooFewLayers: there are more stages than blocks.
        StrategyError: a device is too small for its stage.
    """
    if stages > len(blocks):
        raise _too_few(blocks, stages)
    times = [block.time for block in blocks]
    before = list(itertools.accumulate(times, initial=0.0))

    def cost(stage: int, first: int, last: int) -> Cost:
        """Tell how many times too large a stage is for its device, and its time."""
        time = before[last] - before[first]
        if capacity is None:
            return 0.0, time
        needed = need(stage, blocks[first:last])
        share = needed / max(capacity[stage], 1.0)
        return share if share > 1 else 0.0, time

    (over, fastest), bounds = _best(len(blocks), stages, cost, _slower)
    if over and capacity is not None:
        ends = list(itertools.pairwise(bounds))
        stage = max(range(stages), key=lambda stage: cost(stage, *ends[stage]))
        first, last = ends[stage]
        run = blocks[first:last]
        needed = size(need(stage, run))
        has = size(capacity[stage])
        device = f"device {stage}"
        if devices:
            device = devices[stage]
        raise StrategyError(
            f"partition: no split fits: stage {stage} ({run[0].name} to {run[-1].name}) needs "
            f"{needed}, and {device} has {has}: use more devices, a smaller batch_size, more "
            "micro-batches, or activation_checkpointing"
        )
    limit = fastest * (1 + slack) + 1e-12

    def sent(stage: int, first: int, last: int) -> Cost:
        """Count the bytes that this stage's end sends on; of equal ones the upper cut in the tree
        of modules.
        """
        too_large, time = cost(stage, first, last)
        if too_large or time > limit:
            return math.inf, 0.0
        if last == len(blocks):
            return 0.0, 0.0
        return blocks[last - 1].crossing, _depth(blocks, last)

    (least, _), bounds_of_least = _best(len(blocks), stages, sent, _sum)
    if math.isinf(least):
        return bounds
    return bounds_of_least


def _too_few(blocks: Sequence[Block], stages: int) -> TooFewLayers:
    """Make the error of a model that has fewer blocks than stages."""
    shown = [block.name or "the model" for block in blocks[:4]]
    if len(blocks) > 4:
        shown.append("...")
    has = counted(len(blocks), "block")
    fits = counted(max(len(blocks), 1), "device")
    return TooFewLayers(
        f"partition: {stages} stages, but the model has {has} that can be placed "
        f"({', '.join(shown)}): use {fits}"
    )


def _slower(one: Cost, other: Cost) -> Cost:
    """Give the larger first number, and the larger second number."""
    return max(one[0], other[0]), max(one[1], other[1])


def _sum(one: Cost, other: Cost) -> Cost:
    """Add the first numbers, and the second numbers."""
    return one[0] + other[0], one[1] + other[1]


def _best(
    blocks: int,
    stages: int,
    cost: Callable[[int, int, int], Cost],
    together: Callable[[Cost, Cost], Cost],
) -> tuple[Cost, list[int]]:
    """Find the least cost of a split, and its bounds.

    Args:
        blocks: how many.
        stages: how many runs of them, none empty.
        cost: gives the cost of a stage by its number, the place of its first block, and the place
            behind its last one.
        together: gives the cost of the stages so far and one more.
    """
    # By the number of blocks before, the best split of them.
    best: dict[int, tuple[Cost, list[int]]] = {0: ((0.0, 0.0), [0])}
    for stage in range(stages):
        found: dict[int, tuple[Cost, list[int]]] = {}
        # Each stage before and behind this one has a block at least.
        most = blocks - (stages - stage - 1)
        for last in range(stage + 1, most + 1):
            found[last] = (math.inf, 0.0), []
            for first, (so_far, bounds) in best.items():
                if first >= last or so_far >= found[last][0]:
                    continue
                value = together(so_far, cost(stage, first, last))
                if value < found[last][0]:
                    found[last] = value, [*bounds, last]
        best = found
    return best[blocks]


def _depth(blocks: Sequence[Block], place: int) -> int:
    """Tell how deep inside of modules a cut before a block lies: the length of both names' common
    beginning.
    """
    above = blocks[place - 1].name.split(".")
    below = blocks[place].name.split(".")
    depth = 0
    for one, other in zip(above, below, strict=False):
        if one != other:
            break
        depth += 1
    return depth
