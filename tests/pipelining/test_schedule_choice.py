"""The choice of schedule and micro-batches, by simulation."""

from __future__ import annotations

import itertools

import pytest

from lockstep.errors import StrategyError
from lockstep.pipelining.planner.plan import (
    Costs,
    Plan,
    at,
    choose_schedule,
)


def stage(
    fixed_time: float = 0.0, per_sample: float = 1.0, kept: float = 1.0, fixed: float = 0.0
) -> Costs:
    """A stage whose forward takes ``fixed_time + per_sample * samples``, and its backward twice
    that.
    """
    forward = {n: fixed_time + per_sample * n for n in (1, 4, 32)}
    return Costs(forward, {n: 2 * time for n, time in forward.items()}, kept, fixed)


TWO = Plan(2, (stage(), stage()))


def test_times_lie_on_a_line_between_the_sizes_that_were_measured() -> None:
    points = {8: 3.0, 32: 9.0}
    assert at(points, 8) == 3.0 and at(points, 20) == 6.0 and at(points, 32) == 9.0
    assert at(points, 4) == 3.0, "a smaller micro-batch than any measured isn't cheaper"
    assert at({8: 1.0, 16: 2.0, 32: 10.0}, 24) == 6.0


def test_where_cutting_costs_nothing_more_microbatches_are_better() -> None:
    choice = choose_schedule(32, [TWO], microbatches=[1, 2, 4, 8])
    assert str(choice.best) == "1f1b with 8 micro-batches"
    assert choice.best.seconds == pytest.approx(96 * 9 / 8), (
        "filling and draining take one micro-batch's time more"
    )
    assert "1.78 times as fast as one device with the whole batch" in choice.why


def test_where_cutting_costs_few_are_better() -> None:
    dear = Plan(2, (stage(fixed_time=2.0), stage(fixed_time=2.0)))
    choice = choose_schedule(32, [dear])
    seconds = {c.microbatches: c.seconds for c in choice.candidates if c.schedule == "1f1b"}
    assert choice.best.microbatches == min(seconds, key=lambda m: seconds[m]) == 4


def test_what_does_not_fit_is_not_taken() -> None:
    held = [1, 0.5]  # of the batch: what 1F1B holds on two stages with two micro-batches
    assert (
        choose_schedule(32, [TWO], microbatches=[2], capacity=[32 * h for h in held]).best.schedule
        == "1f1b"
    )
    small = choose_schedule(32, [TWO], microbatches=[1, 2, 4, 8], capacity=[16.0, 16.0])
    assert small.best.microbatches == 8 and small.best.schedule == "1f1b"
    assert all(c.schedule == "1f1b" for c in small.candidates if c.filled <= 1)
    room = [64.0, 64.0]
    assert choose_schedule(32, [TWO], schedules=["gpipe"], capacity=room).best.filled == 0.5
    with pytest.raises(
        StrategyError,
        match=r"nothing fits: .* needs 8 B on a device that has 5 B: use more devices",
    ):
        choose_schedule(32, [TWO], microbatches=[4, 8], schedules=["1f1b"], capacity=[5.0, 5.0])


def test_parameters_of_all_stages_of_a_device_count() -> None:
    four = Plan(2, tuple(stage(per_sample=0.5, kept=0.5, fixed=f) for f in (1.0, 2.0, 3.0, 4.0)))
    choice = choose_schedule(
        32, [four], microbatches=[8], schedules=["interleaved"], capacity=[100.0, 1000.0]
    )
    held = choice.best.timeline.held(dict.fromkeys(range(4), 0.5 * 4))
    assert choice.best.filled == (held[0] + 1 + 3) / 100


def test_more_stages_on_each_device_are_taken_where_they_gain() -> None:
    four = Plan(2, tuple(stage(per_sample=0.5, kept=0.5) for _ in range(4)))
    choice = choose_schedule(32, [TWO, four], microbatches=[4])
    assert choice.best.schedule == "interleaved" and choice.best.seconds < 96 * 5 / 4
    dear = Plan(2, tuple(stage(fixed_time=1.0, per_sample=0.5) for _ in range(4)))
    assert choose_schedule(32, [TWO, dear], microbatches=[4]).best.plan == TWO


def test_the_choice_is_never_slower_than_any_that_fits() -> None:
    for times in itertools.product([0.5, 2.0], repeat=3):
        plan = Plan(3, tuple(stage(0.3, time) for time in times))
        choice = choose_schedule(24, [plan], capacity=[16.0] * 3)
        fastest = min(c.seconds for c in choice.candidates if c.filled <= 1)
        assert choice.best.filled <= 1 and choice.best.seconds <= 1.01 * fastest


def test_numbers_above_the_batch_are_not_tried() -> None:
    assert {c.microbatches for c in choose_schedule(3, [TWO]).candidates} == {1, 2, 3}
    with pytest.raises(StrategyError, match="no schedule with"):
        choose_schedule(3, [TWO], microbatches=[4])
