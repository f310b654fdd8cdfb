"""The recipes of docs/recipes.md, run as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from pages import ROOT, blocks
from stand_in import calls, service
from zoo import drawn, labels, mlp

PAGE = ROOT / "docs" / "recipes.md"
BLOCKS = [block.text for block in blocks(PAGE) if block.language == "python"]
ON = {"single": "1xcpu", "ddp": "2xcpu"}


def job(**settings: Any) -> Job:
    fields: dict[str, Any] = {
        "model": mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train_data": TensorDataset(drawn(32, 6), labels(32, 3)),
        "eval_data": TensorDataset(drawn(16, 6, seed=8), labels(16, 3, seed=9)),
        "batch_size": 8,
        "epochs": 2,
    }
    return Job(**{**fields, **settings})


def recipes(*, up_to: str) -> dict[str, Any]:
    """What the page's code has defined, up to the block with these words."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if "lockstep.train" not in block:
            exec(compile(block, str(PAGE), "exec"), names)
        if up_to in block:
            return names
    raise AssertionError(f"{up_to} is not on the page")


def rising(**settings: Any) -> Job:
    """The weight goes from 0 towards 10, and on its way passes the 3 that the evaluation set wants."""
    return job(
        model=lambda: nn.Linear(1, 1, bias=False),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        train_data=TensorDataset(torch.ones(32, 1), torch.full((32, 1), 10.0)),
        eval_data=TensorDataset(torch.ones(16, 1), torch.full((16, 1), 3.0)),
        epochs=60,
        **settings,
    )


def since_the_best(losses: list[float]) -> int:
    return len(losses) - 1 - losses.index(min(losses))


def test_every_recipe_is_short() -> None:
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        assert len([line for line in block.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("strategy", ON)
def test_early_stopping_stops_when_the_loss_has_not_fallen(strategy: str, tmp_path: Path) -> None:
    stop = recipes(up_to="def early_stopping")["early_stopping"](patience=2)
    run = lockstep.train(rising(on_event=[stop]), strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    losses = [record["eval_loss"] for record in run.history]
    assert len(losses) == run.summary["epochs"] < 60
    assert [since_the_best(losses[:end]) >= 2 for end in range(1, len(losses) + 1)].index(True) == len(losses) - 1


def test_early_stopping_knows_what_came_before_a_resume(tmp_path: Path) -> None:
    make = recipes(up_to="def early_stopping")["early_stopping"]
    run = lockstep.train(rising(on_event=[make(patience=3)]), devices=1, folder=tmp_path, quiet=True)
    before = run.summary["epochs"]
    again = lockstep.train(rising(on_event=[make(patience=3)]), devices=1, resume=run.folder, quiet=True)
    losses = [record["eval_loss"] for record in again.history]
    # One more that is no better is enough, where a recipe that forgets would go on for three.
    assert since_the_best(losses) == 4
    assert len(losses) == before + 1


def test_the_use_of_it_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**recipes(up_to="def early_stopping"), "job": rising()}
    [use] = [block for block in BLOCKS if "lockstep.train" in block]
    exec(compile(use, str(PAGE), "exec"), names)
    assert names["run"].summary["epochs"] < 100
    assert isinstance(names["model"], nn.Module)


@pytest.mark.parametrize("strategy", ON)
def test_weights_and_biases_is_told_once(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = service("wandb", tmp_path, monkeypatch)
    told = job(on_event=[recipes(up_to="def to_wandb")["to_wandb"]])
    run = lockstep.train(told, strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    init, *logs, finish = calls(log)
    assert (init[0], finish) == ("init", ["finish", [], {}])
    assert (init[2]["project"], init[2]["id"], init[2]["resume"]) == ("digits", run.folder.name, "allow")
    assert init[2]["config"]["settings"]["batch_size"] == 8
    assert [(name, values["eval_loss"], named) for name, [values], named in logs] == [
        ("log", record["eval_loss"], {"step": record["step"]}) for record in run.history
    ]


@pytest.mark.parametrize("strategy", ON)
def test_mlflow_is_told_once(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = service("mlflow", tmp_path, monkeypatch)
    told = job(on_event=[recipes(up_to="def to_mlflow")["to_mlflow"]])
    run = lockstep.train(told, strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    start, params, *logs, end = calls(log)
    assert start == ["start_run", [], {"run_name": run.folder.name}]
    assert (params[0], params[1][0]["strategy"], params[1][0]["batch_size"]) == ("log_params", strategy, 8)
    assert [(name, values["eval_loss"], named) for name, [values], named in logs] == [
        ("log_metrics", record["eval_loss"], {"step": record["step"]}) for record in run.history
    ]
    assert end == ["end_run", [], {}]
