"""Schedules in the shape of their pictures, and their reader."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.errors import StrategyError
from lockstep.pipelining.planner.simulate import Timeline, simulate
from lockstep.pipelining.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    devices_of,
    gpipe,
    interleaved,
    merged,
    one_f_one_b,
    orders_of,
    straight,
)


def parse(text: str) -> Schedule:
    """A schedule of words."""
    return [[action_of(word) for word in line.split()] for line in text.strip().splitlines()]


def action_of(word: str) -> Action:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FB])(\d+)", word).groups()
    return Action(int(stage), kind, int(microbatch))


def taking(forward: Any, backward: Any) -> Callable[[Action], float]:
    """One time for all, one for each stage, or for each stage one for each micro-batch."""

    def seconds(action: Action) -> float:
        found = forward if action.kind == "F" else backward
        for index in (action.stage, action.microbatch):
            found = found[index] if isinstance(found, list) else found
        return float(found)

    return seconds


def picture(timeline: Timeline) -> list[str]:
    """As in the docstrings: an action or a dot for each unit of time."""
    rows = []
    several = len({span.action.stage for spans in timeline.devices for span in spans}) > len(
        timeline.devices
    )
    for spans in timeline.devices:
        row = ["."] * round(timeline.makespan)
        for action, start, end in spans:
            row[round(start) : round(end)] = [str(action)[0 if several else 1 :]] * round(
                end - start
            )
        rows.append(" ".join(row))
    return rows


def test_gpipe_has_every_forward_and_then_every_backward() -> None:
    assert picture(simulate(gpipe(4, 4))) == [
        "F0 F1 F2 F3 . . . . . . B0 B1 B2 B3",
        ". F0 F1 F2 F3 . . . . B0 B1 B2 B3 .",
        ". . F0 F1 F2 F3 . . B0 B1 B2 B3 . .",
        ". . . F0 F1 F2 F3 B0 B1 B2 B3 . . .",
    ]


def test_one_f_one_b_goes_ahead_just_far_enough_to_reach_the_last_stage() -> None:
    assert picture(simulate(one_f_one_b(4, 6))) == [
        "F0 F1 F2 F3 . . . B0 F4 B1 F5 B2 . B3 . B4 . B5",
        ". F0 F1 F2 . . B0 F3 B1 F4 B2 F5 B3 . B4 . B5 .",
        ". . F0 F1 . B0 F2 B1 F3 B2 F4 B3 F5 B4 . B5 . .",
        ". . . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 . . .",
    ]


def test_interleaved_passes_twice_over_the_devices() -> None:
    assert picture(simulate(interleaved(2, 4))) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 . 2B2 . 2B3 0B2 0B3",
        ". 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .",
    ]


def test_fewer_microbatches_than_stages_are_a_schedule_too() -> None:
    assert one_f_one_b(3, 1) == parse("0F0 0B0\n1F0 1B0\n2F0 2B0") == gpipe(3, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_run_and_sums_gradients_in_the_order_of_one_device(name: str) -> None:
    for devices in range(1, 7):
        for microbatches in range(1, 15):
            schedule = SCHEDULES[name](devices, microbatches)
            simulate(schedule)
            places = devices_of(schedule)
            actions = sorted(itertools.chain(*schedule))
            assert actions == sorted(
                itertools.product(range(len(places)), "FB", range(microbatches))
            ), "each once"
            assert all(
                places[a.stage] == device for device, order in enumerate(schedule) for a in order
            ), "a stage is on one device"
            for stage in places:
                mine = [
                    a.microbatch
                    for order in schedule
                    for a in order
                    if a.stage == stage and a.kind == "B"
                ]
                assert mine == sorted(mine) == list(range(microbatches))


def test_interleaved_takes_any_number_of_chunks_and_microbatches() -> None:
    for devices, microbatches, chunks in [(4, 5, 3), (5, 7, 2), (3, 10, 4), (1, 3, 2)]:
        schedule = interleaved(devices, microbatches, chunks)
        simulate(schedule)
        assert devices_of(schedule) == {s: s % devices for s in range(devices * chunks)}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_bubble_of_equal_stages_is_the_known_one(stages: int, microbatches: int) -> None:
    known = (stages - 1) / (microbatches + stages - 1)
    for schedule in (gpipe, one_f_one_b):
        assert simulate(schedule(stages, microbatches), taking(1.0, 2.0)).bubble == pytest.approx(
            known
        )
    if microbatches % stages == 0:
        halved = (stages - 1) / (2 * microbatches + stages - 1)
        assert simulate(
            interleaved(stages, microbatches), taking(1.0, 2.0)
        ).bubble == pytest.approx(halved)


def test_one_f_one_b_holds_as_many_microbatches_as_there_are_stages_behind() -> None:
    assert simulate(one_f_one_b(4, 16)).held() == (4, 3, 2, 1)
    assert simulate(gpipe(4, 16)).held() == (16, 16, 16, 16)
    assert simulate(one_f_one_b(2, 2)).held({0: 10.0, 1: 7.0}) == (20.0, 7.0), (
        "bytes of a micro-batch, by stage"
    )
    two_a_device = simulate(interleaved(2, 8))
    for stage, held in enumerate((4, 3, 2, 1)):
        sizes = {other: float(other == stage) for other in range(4)}
        assert max(two_a_device.held(sizes)) == held


def test_each_stage_and_microbatch_may_take_its_own_time() -> None:
    even = simulate(one_f_one_b(2, 2), taking([1.0, 3.0], [2.0, 5.0]))
    assert [[tuple(span) for span in spans] for spans in even.devices] == [
        [
            (Action(0, "F", 0), 0, 1),
            (Action(0, "F", 1), 1, 2),
            (Action(0, "B", 0), 9, 11),
            (Action(0, "B", 1), 17, 19),
        ],
        [
            (Action(1, "F", 0), 1, 4),
            (Action(1, "B", 0), 4, 9),
            (Action(1, "F", 1), 9, 12),
            (Action(1, "B", 1), 12, 17),
        ],
    ]
    assert even.makespan == 19 and even.bubble == pytest.approx(1 - 22 / 38)
    smaller_last = simulate(
        one_f_one_b(2, 2), taking([[1.0, 0.5], [3.0, 1.5]], [[2.0, 1.0], [5.0, 2.5]])
    )
    assert smaller_last.makespan == 14
    assert simulate(one_f_one_b(2, 2), taking([1.0, 3.0], [2.0, 5.0]), transfer=0.5).makespan == 20


@pytest.mark.parametrize("text", ["0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "0B0 0F0"])
def test_a_schedule_that_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="wait for each other for ever"):
        simulate(parse(text))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 5), (4, 8)])
def test_one_list_of_all_devices_has_each_ones_order_and_nothing_before_what_it_needs(
    name: str, devices: int, microbatches: int
) -> None:
    schedule = SCHEDULES[name](devices, microbatches)
    route = straight(len(devices_of(schedule)))
    orders = orders_of(route, schedule, microbatches)
    found = merged(route, orders)
    assert [[key for key in found if key in order] for order in orders] == orders
    at = {key: place for place, key in enumerate(found)}
    assert all(at[i - 1, m] < place for (i, m), place in at.items() if i)
