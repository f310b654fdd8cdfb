"""What is done every so many steps, epochs or minutes: evaluated, saved; also where one epoch is the whole run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Event, Job, Run, train
from lockstep.errors import JobError
from lockstep.job import Every
from lockstep.verify import same_bits
from zoo import drawn, labels

ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "pp": "2xcpu"}
TIMES = {"seconds", "samples_per_second", "tokens_per_second"}


def a_job(**settings: Any) -> Job:
    """Of 10 steps an epoch."""
    inputs, targets = drawn(40, 6), labels(40, 3)
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "train_data": TensorDataset(inputs, targets),
        "eval_data": TensorDataset(inputs[:30], targets[:30]),
        "batch_size": 4,
        "precision": "fp64",
    }
    return Job(**{**usual, **settings})


def one_epoch(**settings: Any) -> Job:
    """An epoch is the whole run, evaluated after steps 3, 6, 9 and 10."""
    return a_job(**{"epochs": 1, "eval_every": 3, **settings})


def run_of(job: Job, folder: Path, strategy: str = "single", **settings: Any) -> Run:
    return train(job, strategy=strategy, devices=ON[strategy], folder=folder, quiet=True, **settings)


def records(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in run.history]


def evaluated(run: Run) -> list[int]:
    return [record["step"] for record in run.history if "eval_loss" in record]


def test_steps_epochs_and_times_are_told_apart() -> None:
    said: dict[Any, Every] = {
        100: Every(steps=100), "100": Every(steps=100), "1 step": Every(steps=1), "2 epochs": Every(epochs=2),
        "1epoch": Every(epochs=1), "90 s": Every(seconds=90), "1.5min": Every(seconds=90), "2h": Every(seconds=7200),
        None: Every(epochs=1), "none": Every(epochs=1),
    }  # fmt: skip
    assert {value: Every.read(value, "eval_every") for value in said} == said
    for wrong in (0, "0 epochs", "1.5 epochs", "2.5", "often", -3, "3 minuets"):
        with pytest.raises(JobError, match=rf"eval_every: '?{wrong}'? is neither a number of steps"):
            a_job(eval_every=wrong)


def test_evaluations_and_checkpoints_within_an_epoch_move_nothing(tmp_path: Path) -> None:
    whole = run_of(a_job(epochs=1), tmp_path / "whole")
    run = run_of(one_epoch(save_every=4, keep=9), tmp_path / "run")
    assert same_bits(run.model(), whole.model()) and records(run)[-1] == records(whole)[-1]
    saved = {int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir()}
    assert {4, 8, 10} <= saved


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(one_epoch(), tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("strategy", ["dp", "ddp", "pp"])
def test_an_epoch_is_evaluated_inside_under_every_strategy(strategy: str, on_one_device: Run, tmp_path: Path) -> None:
    run = run_of(one_epoch(save_every=4), tmp_path, strategy)
    assert evaluated(run) == [3, 6, 9, 10]
    for mine, its in zip(records(run), records(on_one_device), strict=True):
        assert mine == pytest.approx(its, rel=1e-10)


def killing(at: int) -> Callable[[Any, Any], Any]:
    """A loss that sends this process SIGTERM in that step."""
    steps = iter(range(1, 1000))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if outputs.requires_grad and next(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    return loss


@pytest.mark.parametrize("at", [2, 6, 10])
def test_a_run_of_one_epoch_is_stopped_and_goes_on_inside_it(at: int, tmp_path: Path) -> None:
    """The evaluation of step 6 is owed where the run is stopped in that step."""
    whole = run_of(one_epoch(loss=killing(0)), tmp_path / "whole")
    with pytest.raises(SystemExit):
        run_of(one_epoch(loss=killing(at)), tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    run = run_of(one_epoch(loss=killing(0)), tmp_path, resume=folder)
    assert same_bits(run.model(), whole.model()) and same_bits(run.model(best=True), whole.model(best=True))
    assert records(run) == records(whole)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_time_is_told_to_all_ranks(strategy: str, tmp_path: Path) -> None:
    """A millionth of a second is over at each step that rank 0 looks at; a day never is."""
    run = run_of(one_epoch(eval_every="0.000001 s", save_every="24 h"), tmp_path, strategy)
    assert evaluated(run)[0] == 1 and evaluated(run)[-1] == 10
    assert evaluated(run_of(one_epoch(eval_every="24 h", epochs=2), tmp_path / "never", strategy)) == [20]


def test_every_other_epoch_is_evaluated_and_saved(tmp_path: Path) -> None:
    job = a_job(epochs=5, eval_every="2 epochs", save_every="3 epochs", keep=9)
    run = run_of(job, tmp_path)
    assert [(r["epoch"], "eval_loss" in r) for r in run.history] == [
        (1, False), (2, True), (3, False), (4, True), (5, True)
    ]  # fmt: skip
    saved = {int(path.name.removeprefix("step-")) // 10 for path in (run.folder / "checkpoints").iterdir()}
    assert {3, 5} <= saved and 1 not in saved
    assert saved - {3, 5} <= {2, 4}, "the best so far are saved too"


def test_a_function_may_stop_the_training_within_an_epoch(tmp_path: Path) -> None:
    def stop(event: Event) -> str | None:
        return "stop" if event.kind == "evaluated" and event.step == 6 else None

    run = run_of(one_epoch(on_event=[stop]), tmp_path, "ddp")
    assert (run.summary["steps"], evaluated(run)) == (6, [3, 6])
    assert run.history[-1]["train_loss"] > 0, "the epoch has its record, up to there"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(drawn(40, 6), labels(40, 3), strict=True))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_stream_is_evaluated_by_steps_too(strategy: str, tmp_path: Path) -> None:
    """Of a stream nobody knows that step 10 is the last one of an epoch; it has one record."""
    run = run_of(one_epoch(train_data=Stream(), eval_every=5, shuffle=False, epochs=2), tmp_path, strategy)
    assert [r["step"] for r in run.history] == [5, 10, 15, 20]
    assert ["train_loss" in r for r in run.history] == [False, True, False, True]


def test_a_plateau_is_shown_each_evaluation_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(ReduceLROnPlateau, "step", lambda self, loss, epoch=None: shown.append(loss))
    job = a_job(epochs=5, eval_every="2 epochs", lr_scheduler=ReduceLROnPlateau)
    run = run_of(job, tmp_path)
    assert shown == [r["eval_loss"] for r in run.history if "eval_loss" in r]


def test_hogwild_evaluates_at_the_end_of_an_epoch_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(one_epoch(save_every=2), strategy="hogwild", devices="2xcpu", folder=tmp_path)
    said = capsys.readouterr().out
    assert "note: eval_every: these ranks meet at the end of an epoch only, and evaluate there" in said
    assert "note: save_every: these ranks meet at the end of an epoch only, and save there" in said


def test_a_line_for_an_evaluation_within_an_epoch_says_its_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(one_epoch(), devices="1xcpu", folder=tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 4
    assert re.fullmatch(r"epoch   1  step 3  eval loss \d\.\d{4}", lines[0])
    assert re.fullmatch(r"epoch   1  train loss \d\.\d{4}  eval loss \d\.\d{4}  [\d,]+ samples/s", lines[-1])
