"""The split: which run of blocks makes which stage. Exact, by a dynamic program over the order of execution.

::

    best[s][j]  =  min over i < j of  max(best[s-1][i], time of blocks i to j-1)      s stages, the first j blocks

The slowest stage sets the pace of a pipeline, so the split with the fastest slowest stage is the best one. Among splits
that are as fast (within ``slack``) the one is taken whose cuts send the fewest bytes on: between two residual blocks
rather than inside of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from lockstep.errors import StrategyError, TooFewLayers
from lockstep.pipelining.planner.blocks import Block

Need = Callable[[int, int, int], float]
"""(stage, first block, last block + 1) -> bytes."""


def split(
    blocks: Sequence[Block],
    stages: int,
    *,
    need: Need | None = None,
    capacity: Sequence[float] = (),
    devices: Sequence[str] = (),
    slack: float = 0.0,
) -> list[int]:
    """Where each stage begins: its first block's place, for every stage, and the number of blocks at the end.

    Args:
        blocks: in the order of execution.
        stages: how many runs of them, none empty.
        need: the bytes that a stage needs; None doesn't look at memory.
        capacity: of each stage's device, in bytes.
        devices: their names, for messages.
        slack: how much slower than the fastest the slowest stage may be for fewer bytes to cross, as a share.

    Raises:
        TooFewLayers: there are more stages than blocks.
        StrategyError: a device is too small for its stage.
    """
    if stages < 1:
        raise StrategyError(f"partition: {stages} stages; there is at least one")
    if stages > len(blocks):
        names = ", ".join(block.name or "the model" for block in blocks[:4]) + (", ..." if len(blocks) > 4 else "")
        raise TooFewLayers(
            f"partition: {stages} stages, but the model has {len(blocks)} block{'s' * (len(blocks) != 1)} that can be "
            f"placed ({names}): use {max(len(blocks), 1)} device{'s' * (len(blocks) != 1)}"
        )
    before = list(itertools.accumulate((block.time for block in blocks), initial=0.0))

    def time(stage: int, first: int, last: int) -> float:
        return before[last] - before[first]

    def fits(stage: int, first: int, last: int) -> bool:
        return need is None or need(stage, first, last) <= capacity[stage]

    fastest, bounds = _best(len(blocks), stages, lambda *run: time(*run) if fits(*run) else math.inf, max)
    if math.isinf(fastest):
        assert need is not None
        raise StrategyError(_too_small(blocks, stages, need, capacity, devices))
    limit = fastest * (1 + slack) + 1e-12

    def sent(stage: int, first: int, last: int) -> float:
        """The bytes that this stage's end sends on; of equal ones the upper cut in the tree of modules."""
        if not fits(stage, first, last) or time(stage, first, last) > limit:
            return math.inf
        if last == len(blocks):
            return 0.0
        return blocks[last - 1].crossing + 1e-3 * _depth(blocks[last - 1].name, blocks[last].name)

    least, bounds_of_least = _best(len(blocks), stages, sent, lambda a, b: a + b)
    return bounds if math.isinf(least) else bounds_of_least


def _best(
    blocks: int, stages: int, cost: Callable[[int, int, int], float], together: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least cost of a split, and its bounds; infinite where there is none."""
    best = [[math.inf] * (blocks + 1) for _ in range(stages + 1)]
    begin = [[0] * (blocks + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for s in range(1, stages + 1):
        # Each stage before and behind this one has a block at least.
        for j in range(s, blocks - (stages - s) + 1):
            for i in range(s - 1, j):
                if best[s - 1][i] < best[s][j]:
                    value = together(best[s - 1][i], cost(s - 1, i, j))
                    if value < best[s][j]:
                        best[s][j], begin[s][j] = value, i
    bounds = [blocks]
    for s in range(stages, 0, -1):
        bounds.append(begin[s][bounds[-1]])
    return best[stages][blocks], bounds[::-1]


def _depth(before: str, behind: str) -> int:
    """How deep inside of modules a cut between two blocks lies: the length of their names' common beginning."""
    both = zip(before.split("."), behind.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def _too_small(
    blocks: Sequence[Block], stages: int, need: Need, capacity: Sequence[float], devices: Sequence[str]
) -> str:
    """What is wrong with the split that comes nearest to fitting."""

    def over(stage: int, first: int, last: int) -> float:
        return need(stage, first, last) / max(capacity[stage], 1.0)

    _, bounds = _best(len(blocks), stages, over, max)
    runs = list(zip(range(stages), bounds[:-1], bounds[1:], strict=True))
    stage, first, last = max(runs, key=lambda run: over(*run))
    device = devices[stage] if devices else f"device {stage}"
    return (
        f"partition: no split fits: stage {stage} ({blocks[first].name} to {blocks[last - 1].name}) needs "
        f"{size(need(stage, first, last))}, and {device} has {size(capacity[stage])}: use more devices, a smaller "
        "batch_size, more micro-batches, or activation_checkpointing"
    )


def size(count: float) -> str:
    """``1.5 GiB``, ``12 MiB``, ``300 KiB``, ``17 B``."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= one:
            return f"{count / one:.3g} {unit}" if count < 999.5 * one else f"{count / one:,.0f} {unit}"
    return f"{count:.0f} B"
