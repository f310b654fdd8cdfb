"""The split: which run of blocks makes which stage. Exact, by a dynamic program over the order of
execution.

::

    best[s][j]  =  min over i < j of  max(best[s-1][i], time of blocks i to j-1)  s stages, the first j blocks

The slowest stage sets the pace of a pipeline, so the split with the fastest slowest stage is the
best one. A stage that begins or ends deep inside of modules counts as a little slower (by
``slack`` at most), so of splits that are as fast the one is taken that cuts between two residual
blocks rather than inside of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from lockstep.errors import TooFewLayers, counted
from lockstep.pipelining.planner.blocks import Block

_Best = tuple[float, list[int]]
"""Of a split: the slowest stage's time, and the bounds."""


def split(
    blocks: Sequence[Block],
    stages: int,
    *,
    cost: Callable[[Block], float] = lambda block: block.time,
    rooms: Sequence[float] | None = None,
    slack: float = 0.0,
) -> list[int]:
    """Find where each stage begins: its first block's place, for every stage, and the number of
    blocks at the end.

    Args:
        blocks: in the order of execution.
        stages: how many runs of them, none empty.
        cost: what is divided: seconds, or bytes.
        rooms: what each stage has for it, in proportion; None is evenly.
        slack: how much slower than the fastest the slowest stage may be for a cut higher up in the
            tree of modules, as a share.

    Raises:
        TooFewLayers: there are more stages than blocks.
    """
    if stages > len(blocks):
        has = counted(len(blocks), "block")
        raise TooFewLayers(
            f"partition: {stages} stages, but the model has {has} that can be placed: use "
            f"{counted(len(blocks), 'device')}"
        )
    before = list(itertools.accumulate(map(cost, blocks), initial=0.0))
    depths = _depths(blocks)
    deepest = max(depths) or 1

    # By the number of blocks before, the best split of them.
    best: dict[int, _Best] = {0: (0.0, [0])}
    for stage in range(stages):
        found: dict[int, _Best] = {}
        # Each stage before and behind this one has a block at least.
        most = len(blocks) - (stages - stage - 1)
        for last in range(stage + 1, most + 1):
            found[last] = math.inf, []
            for first, (slowest, bounds) in best.items():
                if first >= last:
                    continue
                depth = (depths[first] + depths[last]) / (2 * deepest)
                time = (before[last] - before[first]) * (1 + slack * depth)
                if rooms is not None:
                    time /= max(rooms[stage], 1.0)
                if max(slowest, time) < found[last][0]:
                    found[last] = max(slowest, time), [*bounds, last]
        best = found
    return best[len(blocks)][1]


def _depths(blocks: Sequence[Block]) -> list[int]:
    """Tell how deep inside of modules a cut before each block, and behind the last one, lies: the
    length of both names' common beginning.
    """
    depths = [0]
    for above, below in itertools.pairwise(blocks):
        depth = 0
        for one, other in zip(above.name.split("."), below.name.split("."), strict=False):
            if one != other:
                break
            depth += 1
        depths.append(depth)
    return [*depths, 0]
