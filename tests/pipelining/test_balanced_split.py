"""The split is the best one, and prefers cuts between modules."""

from __future__ import annotations

import itertools
import random

import pytest

from lockstep.errors import StrategyError
from lockstep.pipelining.planner.balanced_split import split
from lockstep.pipelining.planner.blocks import Block


def blocks(times: list[float]) -> list[Block]:
    return [Block(f"b{i}", forward=time) for i, time in enumerate(times)]


def slowest(of: list[Block], bounds: list[int]) -> float:
    runs = [of[i:j] for i, j in itertools.pairwise(bounds)]
    return max(sum(block.forward for block in run) for run in runs)


def test_no_other_split_has_a_faster_slowest_stage() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        count = drawn.randint(1, 9)
        stages = drawn.randint(1, min(4, count))
        of = blocks([drawn.uniform(0.1, 3) for _ in range(count)])
        cuts = itertools.combinations(range(1, count), stages - 1)
        best = min(slowest(of, [0, *inner, count]) for inner in cuts)
        bounds = split(of, stages)
        assert bounds[0] == 0 and bounds[-1] == count and len(bounds) == stages + 1
        assert all(i < j for i, j in itertools.pairwise(bounds))
        assert slowest(of, bounds) == pytest.approx(best)


def test_of_splits_that_are_as_fast_the_one_between_two_modules_is_taken() -> None:
    assert split(blocks([1.0] * 6), 2) == [0, 3, 6]
    of = [Block(name, forward=1.0) for name in ("a.x", "a.y", "a.z", "b.x", "b.y")]
    assert split(of, 2) == [0, 2, 5] and split(of, 2, slack=0.01) == [0, 3, 5]


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        StrategyError, match=r"3 stages, but the model has 2 blocks that .*: use 2 devices"
    ):
        split(blocks([1.0, 1.0]), 3)
