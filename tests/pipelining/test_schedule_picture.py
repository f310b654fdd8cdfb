"""`lockstep schedule`: the grid, its bubble."""

from __future__ import annotations

import pytest

from lockstep.cli.command import main
from lockstep.pipelining.planner.schedule_picture import grid, key
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.schedule import SCHEDULES
from lockstep.pipelining.timeline import Action, Span, Timeline


def test_the_grid_of_one_f_one_b_with_its_bubble(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedule", "--stages", "4", "--microbatches", "8", "--schedule", "1f1b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 4 devices, 8 micro-batches",
        "0  F0 F1 F2 F3 ·········B0 F4 B1 F5 B2 F6 B3 F7 B4 ···B5 ···B6 ···B7",
        "1  ···F0 F1 F2 ······B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 ···B6 ···B7 ···",
        "2  ······F0 F1 ···B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 ···B7 ······",
        "3  ·········F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 ·········",
        "bubble 27.3 %, speed-up 2.91; micro-batches held at most: 4 3 2 1",
        *key(80),
    ]
    assert " ".join(key(80)).startswith("F0 is the forward of micro-batch 0, B0 its backward")


def test_one_of_something_is_said_as_one(capsys) -> None:
    assert main(["schedule", "--stages", "1", "--microbatches", "1"]) == 0
    assert capsys.readouterr().out.startswith("1f1b: 1 device, 1 micro-batch\n0  F0 B0")


def test_many_microbatches_are_cut_at_the_width(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["schedule", "--stages", "3", "--microbatches", "512", "--schedule", "1f1b"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "0  F0── F1── F2── ··········B0── F3── B1── F4── B2── F5── …",
        "1  ·····F0── F1── ·····B0── F2── B1── F3── B2── F4── B3── …",
        "2  ··········F0── B0── F1── B1── F2── B2── F3── B3── F4── …",
    ]


def test_the_key_explains_every_sign() -> None:
    assert (
        "··· a device that waits, F0── an action that goes on, … the rest, left out. Bubble"
        in " ".join(key(60))
    )


@pytest.mark.sweep
@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut_in_two(
    name: str, width: int
) -> None:
    for devices, microbatches in [(2, 2), (4, 8), (4, 64), (12, 300)]:
        timeline = simulate(SCHEDULES[name](devices, microbatches), 1.0, 2.3)
        names = {str(span.action) for spans in timeline.devices for span in spans}
        short = {name.lstrip("0123456789") for name in names} | names
        lines = grid(timeline, width)
        assert len(lines) == devices and all(len(line) <= width for line in lines)
        for line in lines:
            for word in line.replace("·", " ").replace("─", " ").replace("…", " ").split()[1:]:
                assert word in short | {"F", "B"}, line


def test_an_action_is_as_wide_as_it_is_long() -> None:
    lasted = [
        ("F", 0, 10, 11),
        ("B", 0, 12, 15),
        ("F", 1, 15, 16),
        ("B", 1, 16, 19),
        ("F", 2, 19, 19.2),
    ]
    measured = Timeline(
        (tuple(Span(Action(0, kind, m), start, end) for kind, m, start, end in lasted),)
    )
    assert measured.makespan == pytest.approx(9.2), "a measured time line need not begin at 0"
    assert grid(measured, 40) == ["0  F0 ···B0────── F1 B1────── F"]


def test_stages_of_one_device_are_told_apart(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert (
        main(
            [
                "schedule",
                "--stages",
                "2",
                "--microbatches",
                "4",
                "--schedule",
                "interleaved",
                "--words",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0  0F0 0F1 2F0 2F1 0F2 2B0") and lines[2].startswith(
        "1  ····1F0 1F1 3F0 3B0"
    )
    assert lines[3] == "bubble 11.1 %, speed-up 1.78; micro-batches held at most: 2.5 1.5"
    assert lines[4].startswith("0F0 0F1 2F0 2F1 0F2")


def test_stage_times_can_be_given(capsys) -> None:
    words = [
        "schedule",
        "--stages",
        "2",
        "--microbatches",
        "2",
        "--forward",
        "1,3",
        "--backward",
        "2,5",
    ]
    assert main(words) == 0
    assert f"bubble {100 - 2200 / 38:.1f} %" in capsys.readouterr().out
    assert main([*words, "--schedule", "gpipe,interleaved", "--transfer", "0.1"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--schedule", "1f1c"], '--schedule: there is no "1f1c"; did you mean "1f1b"?'),
        (
            ["--forward", "nan"],
            "--forward nan: write a time above 0, or one for each stage: 1,2.5,1,1",
        ),
        (["--transfer", "inf"], "--transfer inf: a time is a finite number, not negative"),
        (
            ["--stages", "1000000", "--microbatches", "1000"],
            "schedule: 1000000 stages x 1000 micro-batches are too many to simulate: at most "
            "200,000 together",
        ),
        (["--stages", "0"], "schedule: 0 stages; there is at least one"),
        (["--microbatches", "-3"], "schedule: -3 micro-batches; there is at least one"),
        (
            ["--forward", "1,2,3"],
            "--forward 1,2,3: 3 times for 4 stages; give one, or one for each",
        ),
        (
            ["--backward", "long"],
            "--backward long: write a time above 0, or one for each stage: 1,2.5,1,1",
        ),
        (
            ["--backward", "0"],
            "--backward 0: write a time above 0, or one for each stage: 1,2.5,1,1",
        ),
        (["--transfer", "-1"], "--transfer -1.0: a time is a finite number, not negative"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], says: str, capsys) -> None:
    assert main(["schedule", *words]) == 2
    assert capsys.readouterr().err.strip() == f"lockstep: {says}"
