"""examples/digits.py, the job that `make demo` trains."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.cli.command import main
from lockstep.training.run import job_of

FILE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.slow
def test_digits_are_learned_in_a_few_epochs(tmp_path: Path) -> None:
    run = lockstep.train(
        FILE, strategy="ddp", devices="2xcpu", epochs=4, folder=tmp_path, quiet=True
    )
    assert run.metrics["accuracy"] > 0.9


@pytest.mark.slow
def test_the_annealing_is_as_long_as_the_epochs_of_the_command_line_and_of_a_resume(
    tmp_path: Path,
) -> None:
    words = [
        "--devices",
        "1xcpu",
        "--strategy",
        "single",
        "--folder",
        str(tmp_path),
        "--batch-size",
        "512",
    ]
    assert main(["train", str(FILE), "--epochs", "2", *words]) == 0
    (folder,) = tmp_path.iterdir()
    assert [round(epoch["lr"], 4) for epoch in lockstep.Run.open(folder).history] == [0.05, 0.025]
    assert job_of(folder).load().epochs == 2 and job_of(folder).settings == {
        "batch_size": 512,
        "epochs": 2,
    }
    assert job_of(folder, {"epochs": "3"}).load().epochs == 3, (
        "a parameter with the name of a setting, given now"
    )
    assert job_of(folder, settings={"epochs": 4}).settings["epochs"] == 4
