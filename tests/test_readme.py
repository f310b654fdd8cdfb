"""The README: its first job runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.command import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_first_job_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    Path("job.py").write_text(code[1])
    assert main(["train", "job.py"]) == 0
    assert main(["train", "job.py", "--strategy", "ddp", "--devices", "2xcpu", "--set", "lr=0.002"]) == 0
    losses = [[r["train_loss"] for r in lockstep.Run.open(path).history] for path in sorted(Path("runs").iterdir())]
    assert len(losses) == 2
    for of_epochs in losses:
        assert of_epochs == sorted(of_epochs, reverse=True) and of_epochs[-1] < 2.0
