"""``--json`` and ``--quiet``: what programs read of each command."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import command
from lockstep.cli.command import main
from lockstep.compare.timed_run import TrialResult
from lockstep.launch import doctor

JOB = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def job(scale: float = 1.0, norm: bool = False, lr: float = 0.01):
    data = TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 3)
    return lockstep.Job(
        model=lambda: nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.ReLU(), nn.Linear(4, 3)
        ),
        loss=nn.CrossEntropyLoss(),
        metrics={"scaled": lambda outputs, targets: (outputs.sum() * scale, len(outputs))},
        optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        train_data=data, eval_data=data, batch_size=8,
    )
"""
PAGE = Path(__file__).parents[2] / "docs" / "command.md"
DOCUMENTED = {
    command: set(re.findall(r"`(\w+)`", fields))
    for names, fields in re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    for command in re.findall(r"`(\w+)`", names)
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def answer(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """The object that a command prints on standard output, alone, with the documented fields."""
    capfd.readouterr()
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["schema"] == 1 and found["command"] == words[0]
    return found


def fields(found: dict[str, Any]) -> set[str]:
    return found.keys() - {"schema", "command"}


def test_what_is_done_with_a_run(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = answer(capfd, "train", "job.py", "--devices", "1", "--audit")
    summary = json.loads((Path(found["folder"]) / "summary.json").read_text())
    assert fields(found) == {"folder", *summary} > DOCUMENTED["train"]
    run = found["folder"]
    for words in (
        ("evaluate", run),
        ("predict", run),
        ("export", run, "--format", "safetensors"),
        ("checkpoints", run, "--verify"),
        ("audit", run),
        ("report", run),
    ):
        assert fields(answer(capfd, *words)) == DOCUMENTED[words[0]]
    assert answer(capfd, "audit", run)["epochs"][0]["samples"] == 20
    assert answer(capfd, "checkpoints", run)["checkpoints"][0]["damaged"] is None


def test_what_is_asked_of_pipelines_and_machines(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(capfd, "partition", "job.py", "--devices", "2xcpu")
    assert fields(found) == DOCUMENTED["partition"] - {
        "schedule",
        "microbatches",
        "time",
        "bubble",
    }
    assert DOCUMENTED["devices"] - fields(answer(capfd, "devices")) <= {"accelerators"}
    monkeypatch.setattr(doctor, "_process_groups", lambda: iter([]))
    assert fields(answer(capfd, "doctor")) == DOCUMENTED["doctor"]


def test_how_strategies_are_chosen(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = ("--strategy", "dp", "--devices", "2xcpu")
    found = answer(capfd, "verify", "job.py", *placed)
    assert fields(found) == DOCUMENTED["verify"] and found["equal"] is True
    for module in ("compare", "timed_run", "tune"):
        monkeypatch.setattr(
            importlib.import_module(f"lockstep.compare.{module}"),
            "attempt",
            lambda job, setup, **how: TrialResult(100.0, 0.1, (1000,)),
        )
    names = ("--strategies", "single", "--devices", "1xcpu")
    assert fields(answer(capfd, "compare", "job.py", *names)) == DOCUMENTED["compare"]
    assert fields(answer(capfd, "tune", "job.py", *placed)) == DOCUMENTED["tune"]


def test_the_page_has_every_command() -> None:
    assert sorted(DOCUMENTED) == sorted(command._parser()[1])


def test_an_error_is_one_line_and_no_object(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ("train job.py --epochs x", "evaluate nowhere", "export runs --format onnx"):
        assert main([*words.split(), "--json"]) == 2
        shown = capfd.readouterr()
        assert shown.out == "" and len(shown.err.splitlines()) == 1


def test_json_has_no_infinity(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--json", "job.py", "--set", "scale=inf", "--devices", "1"]
    assert main(words) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["metrics"]["scaled"] is None
    assert "scaled -inf" in shown.err


def test_quiet_leaves_the_result_and_notes(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                "job.py",
                "-q",
                "--strategy",
                "dp",
                "--devices",
                "2xcpu",
                "--set",
                "norm=true",
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    assert re.fullmatch(r"loss \d\.\d{4}.*\nrun: runs/\S+\n", shown.out)
    assert "note: BatchNorm normalizes over" in shown.err
    run = shown.out.split()[-1]
    assert main(["train", "job.py", "-q", "--set", "lr=inf"]) == 1
    assert re.match(r"run: runs/\S+\n", capfd.readouterr().err), "where a run that failed is"
    assert main(["export", run, "--format", "safetensors", "--quiet"]) == 0
    assert re.fullmatch(r"exported: \S+\n", capfd.readouterr().out)
