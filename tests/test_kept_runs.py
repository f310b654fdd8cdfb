"""Runs that were made by an earlier version, kept as data: what is read of them today is what
they had.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import lockstep
from lockstep.training.records.run_page import write_page

DATA = Path(__file__).parent / "kept"
HAVE = {
    "ddp": ({"loss": 0.910801, "accuracy": 0.65}, 14),
    "pp": ({"loss": 0.891302, "accuracy": 0.6}, 10),
}
"""Their evaluation, and their steps. (The one of ``pp`` was stopped within its second epoch, by
``steps``.)
"""
GO_ON = {
    "ddp": ({"epochs": 3}, 21, 1.0580884, 0.8929642),
    "pp": ({"steps": 20}, 14, 0.8224256, 0.8618521),
}
"""With what they go on, to which step, and the losses that the version of then came to."""


@pytest.fixture(params=HAVE)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / f"run-{request.param}"
    shutil.copytree(DATA / folder.name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "file": str(DATA / "job.py")}))
    return folder


def test_a_kept_run_is_evaluated_predicted_and_reported(run: Path) -> None:
    values, steps = HAVE[run.name.removeprefix("run-")]
    assert lockstep.evaluate(run) == pytest.approx(values, abs=1e-6)
    assert lockstep.predict(run).shape == (20, 3)
    opened = lockstep.Run.open(run)
    assert opened.summary["steps"] == steps and opened.history[-1]["step"] == steps
    assert opened.metrics["accuracy"] == pytest.approx(values["accuracy"])
    width = {"ddp": 6, "pp": 8}[opened.summary["strategy"]]  # one was given --set width=6
    assert sum(p.numel() for p in opened.model().parameters()) == 12 * width + 3
    page = write_page(run).read_text()
    assert "eval_loss" in page and f"run-{opened.summary['strategy']}" not in page


def test_a_kept_run_goes_on_with_the_numbers_that_it_had_then(run: Path) -> None:
    name = run.name.removeprefix("run-")
    settings, step, train_loss, eval_loss = GO_ON[name]
    went_on = lockstep.train(
        lockstep.training.run.job_of(run, settings=settings), resume=run, quiet=True
    )
    assert went_on.summary["strategy"] == name and went_on.summary["steps"] == step
    last = went_on.history[-1]
    assert last["train_loss"] == pytest.approx(train_loss, abs=1e-5)
    # The bias before BatchNorm has a gradient of rounding errors only, by whose sign AdamW moves
    # it, and the running mean lags behind: kernels of different processors (ATEN_CPU_CAPABILITY)
    # give evaluations that differ by 3.5e-4.
    assert last["eval_loss"] == pytest.approx(eval_loss, abs=1e-3)
    assert [record["step"] for record in went_on.history][-2:] == [HAVE[name][1], step]
