"""Schedules, in the shape of their pictures."""

from __future__ import annotations

from lockstep.pipelining.schedule import Action, gpipe, one_f_one_b


def words(schedule: list[list[Action]]) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule]


def test_gpipe_has_every_forward_and_then_every_backward() -> None:
    assert words(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_one_f_one_b_goes_ahead_just_far_enough_to_reach_the_last_stage() -> None:
    assert words(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_fewer_microbatches_than_stages_are_a_schedule_too() -> None:
    assert words(one_f_one_b(3, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"] == words(gpipe(3, 1))


def test_an_action_is_printed_and_read_as_a_word() -> None:
    assert str(Action(2, "F", 0)) == "2F0" and Action.parse("12B7") == Action(12, "B", 7)
