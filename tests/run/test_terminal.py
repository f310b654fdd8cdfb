"""What a person sees within an epoch: on a terminal, in a notebook, in a pipe."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.run import terminal
from lockstep.run.events import Event, Line, Progress
from lockstep.run.terminal import Display, named_number, takes_escapes

LOSSES = {"train_loss": 0.5}


def at(step: int) -> Progress:
    return Progress(1, 1, step, 900, 0.25, 80.0, 65.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(capsys: pytest.CaptureFixture[str], *told: tuple[float, Any]) -> list[str]:
    """The lines of a display in a pipe that was told things at those seconds."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "time", SimpleNamespace(monotonic=clock))
        with Display() as display:
            for clock.now, event in told:
                display.show(event)
    return capsys.readouterr().out.splitlines()


def test_in_a_pipe_a_line_comes_every_ten_seconds_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, *((second / 5, at(second)) for second in range(1, 161)))
    assert lines == [
        f"epoch 1/1  step {step}/900  train loss 0.2500  80 samples/s  1:05 left"
        for step in (50, 100, 150)
    ]


def test_lines_of_epochs_and_evaluations_come_at_once_and_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = Event("evaluated", 1, 40, LOSSES)
    lines = shown(capsys, (8, ended), (9, ended), (12, at(60)), (18.9, at(90)), (19, at(95)))
    assert lines[:2] == ["epoch   1  train loss 0.5000"] * 2
    assert [line.split("  ")[1] for line in lines[2:]] == ["step 95/900"]


def test_in_a_pipe_every_log_is_a_line_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    told = [(3.0 * i, Line(f"log {i}")) for i in range(1, 9)]
    between = [(second / 4, at(second)) for second in range(4, 137)]
    lines = shown(capsys, *sorted([*told, *between], key=lambda one: one[0]))
    assert lines[:-1] == [f"log {i}" for i in range(1, 9)]
    assert "step 136/900" in lines[-1], "ten seconds after the last log"


def test_a_learning_rate_has_all_its_places() -> None:
    rates = {0.0: "0", 1e-05: "1e-05", 0.00125: "0.00125", 0.1: "0.1"}
    assert [named_number("lr", rate) for rate in rates] == [f"lr {text}" for text in rates.values()]
    assert named_number("lr/head", 3e-4) == "lr/head 0.0003"
    assert named_number("train_loss", 0.125) == "train loss 0.1250"


def test_a_training_in_a_pipe_that_is_short_prints_nothing_within_an_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(capsys, (1, at(1)), (9.9, at(2))) == []


class Widget:
    """As ``ipywidgets.Output``: it takes what is displayed inside of it."""

    entered = 0
    taken: list[str] = []  # noqa: RUF012

    def __enter__(self) -> None:
        Widget.entered += 1

    def __exit__(self, *error: object) -> None:
        Widget.entered -= 1

    def clear_output(self, wait: bool = False) -> None: ...

    def close(self) -> None: ...


def display_of_notebook(*things: Any, **settings: Any) -> None:
    if Widget.entered:
        Widget.taken += [getattr(thing, "text", "") for thing in things]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich looks for in a notebook."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    for name, holds in {
        "IPython": {},
        "IPython.display": {"display": display_of_notebook},
        "ipywidgets": {"Output": Widget},
    }.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)


def test_in_a_notebook_the_live_line_is_a_widget_and_other_lines_are_text(
    notebook: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Widget.taken.clear()
    with Display() as display:
        display.show(at(7))
        display._live.refresh()
        display.show(Event("evaluated", 1, 40, LOSSES))
    assert capsys.readouterr().out == "epoch   1  train loss 0.5000\n"
    assert any("step 7/900" in text for text in Widget.taken)


def test_a_notebook_without_widgets_has_lines(
    notebook: None, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ipywidgets")
    assert len(shown(capsys, (10.1, at(7)))) == 1


def test_on_a_terminal_the_line_is_live_and_each_log_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Display() as display:
        display.show(at(7))
        assert display._live is not None
        for i in range(3):
            display.show(Line(f"log {i}"))
    said = capsys.readouterr().out
    assert all(f"log {i}" in said for i in range(3))


@pytest.mark.parametrize(
    ("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("FORCE_COLOR", "1")]
)
def test_escape_sequences_are_for_terminals_that_want_them(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    is_terminal = name != "FORCE_COLOR"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    with Display() as display:
        assert display._live is None
        display.show(Line.note("a"))
    assert not takes_escapes()
    monkeypatch.delenv(name)
    monkeypatch.setenv("TERM", "xterm")
    assert takes_escapes() == is_terminal


def test_a_note_that_several_ranks_tell_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    notes = [Line.note("a"), Line.note("b"), Line.note("a"), Line("done"), Line("done")]
    assert shown(capsys, *((0.0, line) for line in notes)) == ["note: a", "note: b", "done", "done"]


def test_a_training_goes_on_where_its_output_cannot_be_written(tmp_path: Path) -> None:
    """Found by trial: a pipe to head, and a full disk, ended trainings."""
    (tmp_path / "job.py").write_text(
        textwrap.dedent("""
            import lockstep, torch
            data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
            job = lockstep.Job(
                model=lambda: torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(), train_data=data,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=4,
            )
        """)
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "train", "job.py", "--devices", "1xcpu"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert done.stderr == (
        "lockstep: the output can't be written (No space left on device): the training goes on\n"
    )
    assert list(tmp_path.glob("runs/*/model.safetensors"))


def test_prints_of_ranks_that_cannot_be_written_end_no_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full, Display() as display:
        monkeypatch.setattr(sys, "stdout", full)
        display.output("printed by the model\n", "stdout")
        display.output("printed by the model\n", "stdout")
        display.line("epoch 1")
    assert capsys.readouterr().err.count("the training goes on") == 1


def test_notes_that_cannot_be_written_end_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, Display(quiet="notes") as display:
        monkeypatch.setattr(sys, "stderr", full)
        display.show(Line.note("a note"))
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it holds is dropped
