"""The split is the best one, fits into memory, and prefers cuts between modules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from lockstep.errors import StrategyError
from lockstep.pipelining.planner.balanced_split import split
from lockstep.pipelining.planner.blocks import Block


def blocks(times: list[float], weights: list[int] | None = None) -> list[Block]:
    every = zip(times, weights or [0] * len(times), strict=True)
    return [Block(f"b{i}", forward=t, parameters=w) for i, (t, w) in enumerate(every)]


def need(stage: int, run: Sequence[Block]) -> float:
    return sum(block.parameters for block in run)


def by_brute_force(of: list[Block], stages: int, capacity: list[int]) -> float | None:
    slowest = []
    for cuts in itertools.combinations(range(1, len(of)), stages - 1):
        bounds = [0, *cuts, len(of)]
        runs = [of[i:j] for i, j in itertools.pairwise(bounds)]
        if all(sum(b.parameters for b in run) <= c for run, c in zip(runs, capacity, strict=True)):
            slowest.append(max(sum(b.forward for b in run) for run in runs))
    return min(slowest, default=None)


def test_no_other_split_has_a_faster_slowest_stage() -> None:
    drawn = random.Random(1)
    refused = 0
    for _ in range(300):
        count = drawn.randint(1, 9)
        stages = drawn.randint(1, min(4, count))
        of = blocks(
            [drawn.uniform(0.1, 3) for _ in range(count)],
            [drawn.randint(1, 9) for _ in range(count)],
        )
        capacity = [drawn.randint(8, 40) for _ in range(stages)]
        best = by_brute_force(of, stages, capacity)

        if best is None:
            refused += 1
            with pytest.raises(StrategyError, match="no split fits"):
                split(of, stages, need=need, capacity=capacity)
            continue
        bounds = split(of, stages, need=need, capacity=capacity)
        runs = list(itertools.pairwise(bounds))
        assert bounds[0] == 0 and bounds[-1] == count and all(i < j for i, j in runs)
        assert max(sum(b.forward for b in of[i:j]) for i, j in runs) == pytest.approx(best)
        assert all(need(s, of[i:j]) <= capacity[s] for s, (i, j) in enumerate(runs))
    assert 20 < refused < 200


def test_of_splits_that_are_as_fast_the_one_between_two_modules_is_taken() -> None:
    assert split(blocks([1.0] * 6), 2) == [0, 3, 6]
    of = [Block(name, forward=1.0) for name in ("a.x", "a.y", "a.z", "b.x", "b.y")]
    assert split(of, 2) == [0, 2, 5] and split(of, 2, slack=0.01) == [0, 3, 5]


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        StrategyError, match=r"3 stages, but the model has 2 blocks that .*: use 2 devices"
    ):
        split(blocks([1.0, 1.0]), 3)


def test_a_device_that_is_too_small_is_named_with_both_sizes() -> None:
    of = blocks([1.0, 1.0, 1.0], [2**30, 2**30, 5 * 2**30])
    with pytest.raises(StrategyError) as refused:
        split(
            of,
            2,
            need=need,
            capacity=[4 * 2**30, 3 * 2**30],
        )
    assert "stage 1 (b2 to b2) needs 5 GiB, and its device has 3 GiB: use more devices" in str(
        refused.value
    )
