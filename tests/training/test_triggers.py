"""What is done every so many steps, epochs or minutes: logs, evaluations, checkpoints; in a run
of one epoch, too.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Callback, Event, Job, Run, evaluate, train
from lockstep.callbacks import SWA, TrainingContext
from lockstep.errors import JobError
from lockstep.settings import Every

from harness import same_bits  # isort: skip
from zoo import drawn, labels, right, slow

ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "pp": "2xcpu"}
TIMES = {"seconds", "samples_per_second"}


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
    """An epoch is the whole run, logged after steps 4 and 8, evaluated after steps 3, 6, 9 and
    10.
    """
    return a_job(**{"epochs": 1, "log_every": 4, "eval_every": 3, **settings})


def run_of(job: Job, folder: Path, strategy: str = "single", **settings: Any) -> Run:
    return train(
        job, strategy=strategy, devices=ON[strategy], folder=folder, quiet=True, **settings
    )


def records(run: Run) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in run.history
    ]


def evaluated(run: Run) -> list[int]:
    return [record["step"] for record in run.history if "eval_loss" in record]


def test_steps_epochs_and_times_are_told_apart() -> None:
    said: dict[Any, Every] = {
        100: Every(steps=100),
        "100": Every(steps=100),
        "1 step": Every(steps=1),
        "2 epochs": Every(epochs=2),
        "1epoch": Every(epochs=1),
        "90 s": Every(seconds=90),
        "1.5min": Every(seconds=90),
        "2h": Every(seconds=7200),
        None: Every(epochs=1),
        "none": Every(epochs=1),
        "0.25 epochs": Every(epochs=Fraction(1, 4)),
    }
    assert {value: Every.read(value, "eval_every") for value in said} == said
    for wrong in (0, "0 epochs", "1.5 steps", "2.5", "often", -3, "3 minuets"):
        with pytest.raises(
            JobError, match=rf"eval_every: '?{wrong}'? is not valid: give a number of steps"
        ):
            a_job(eval_every=wrong)


def test_evaluations_and_checkpoints_within_an_epoch_move_nothing(tmp_path: Path) -> None:
    whole = run_of(a_job(epochs=1), tmp_path / "whole")
    run = run_of(one_epoch(save_every=4, keep=9), tmp_path / "run")
    assert same_bits(run.model(), whole.model()) and records(run)[-1] == records(whole)[-1]
    assert [record["step"] for record in run.history] == [3, 4, 6, 8, 9, 10]
    saved = {
        int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir()
    }
    assert {4, 8, 10} <= saved


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(one_epoch(), tmp_path_factory.mktemp("single"))


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["dp", "ddp", "pp"])
def test_an_epoch_is_evaluated_inside_under_every_strategy(
    strategy: str, on_one_device: Run, tmp_path: Path
) -> None:
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
    assert same_bits(run.model(), whole.model()) and same_bits(
        run.model(best=True), whole.model(best=True)
    )
    assert records(run) == records(whole)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_time_is_told_to_all_ranks(strategy: str, tmp_path: Path) -> None:
    """A millionth of a second is over at each step that rank 0 looks at; a day never is."""
    run = run_of(one_epoch(eval_every="0.000001 s", save_every="24 h"), tmp_path, strategy)
    assert evaluated(run)[0] == 1 and evaluated(run)[-1] == 10
    assert evaluated(
        run_of(one_epoch(eval_every="24 h", epochs=2), tmp_path / "never", strategy)
    ) == [20]


def test_every_other_epoch_is_evaluated_and_saved(tmp_path: Path) -> None:
    job = a_job(epochs=5, eval_every="2 epochs", save_every="3 epochs", keep=9)
    run = run_of(job, tmp_path)
    assert [(r["epoch"], "eval_loss" in r) for r in run.history] == [
        (1, False),
        (2, True),
        (3, False),
        (4, True),
        (5, True),
    ]
    saved = {
        int(path.name.removeprefix("step-")) // 10
        for path in (run.folder / "checkpoints").iterdir()
    }
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


@pytest.mark.parametrize("strategy", ["single", slow("ddp")])
def test_parts_of_an_epoch_are_counted_in_batches(strategy: str, tmp_path: Path) -> None:
    settings = {"eval_every": "0.5 epochs", "log_every": "0.3 epochs", "save_every": "1.5 epochs"}
    job = a_job(batch_size=6, epochs=2, keep=9, **settings)  # 7 steps an epoch
    run = run_of(job, tmp_path, strategy)
    assert evaluated(run) == [4, 7, 11, 14]
    assert list(logged(run)) == [3, 5, 7, 9, 11, 13]
    saved = {
        int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir()
    }
    assert 11 in saved
    half = run_of(job, tmp_path, strategy, steps=9)
    assert records(run_of(job, tmp_path, strategy, resume=half.folder))[-3:] == records(run)[-3:]


def test_a_part_of_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=r"eval_every: '0\.5 epochs' is a part of an epoch, and a stream has no length",
    ):
        run_of(a_job(train_data=Stream(), eval_every="0.5 epochs"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_stream_is_evaluated_by_steps_too(strategy: str, tmp_path: Path) -> None:
    """Of a stream nobody knows that step 10 is the last one of an epoch; it has one record."""
    run = run_of(
        one_epoch(train_data=Stream(), log_every=5, eval_every=5, shuffle=False, epochs=2),
        tmp_path,
        strategy,
    )
    assert [r["step"] for r in run.history] == [5, 10, 15, 20]
    assert ["train_loss" in r for r in run.history] == [False, True, False, True]
    assert all("loss" in r and "eval_loss" in r for r in run.history)


def test_what_a_callback_changes_at_the_end_of_an_epoch_is_evaluated(tmp_path: Path) -> None:
    run = run_of(
        one_epoch(train_data=Stream(), eval_every=5, shuffle=False, epochs=2, callbacks=[SWA()]),
        tmp_path,
    )
    assert evaluate(run, weights="swa.safetensors", devices="1xcpu")["loss"] == run.metrics["loss"]


def test_a_plateau_is_shown_each_evaluation_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []
    monkeypatch.setattr(
        ReduceLROnPlateau, "step", lambda self, loss, epoch=None: shown.append(loss)
    )
    job = a_job(epochs=5, eval_every="2 epochs", lr_scheduler=ReduceLROnPlateau)
    run = run_of(job, tmp_path)
    *due, last = [r["eval_loss"] for r in run.history if "eval_loss" in r]
    assert shown == due, "a run that goes on makes no evaluation where this one ends"
    assert last == run.metrics["loss"]


def test_hogwild_evaluates_at_the_end_of_an_epoch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(one_epoch(save_every=2), strategy="hogwild", devices="2xcpu", folder=tmp_path)
    said = capsys.readouterr().out
    text = "note: ranks synchronize at the end of an epoch only, and evaluate and save there"
    assert said.count(text) == 1


def test_a_line_for_an_evaluation_within_an_epoch_says_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(one_epoch(), devices="1xcpu", folder=tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 4  # of 3, 6, 9 and 10
    assert re.fullmatch(r"epoch   1  step 3  eval loss \d\.\d{4}", lines[0])
    assert re.fullmatch(
        r"epoch   1  train loss \d\.\d{4}  eval loss \d\.\d{4}  [\d,]+ samples/s", lines[-1]
    )


# ---- logs ----------------------------------------------------------------------------------------


def logged(run: Run, name: str = "loss") -> dict[int, float]:
    return {record["step"]: record[name] for record in run.history if "loss" in record}


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ON)
def test_a_log_has_the_mean_since_the_last_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "epochs": 2,
        "eval_every": None,
        "clip_norm": 0.7,
        "batch_size": 6,
    }  # 7 steps an epoch
    single = logged(run_of(one_epoch(log_every=1, **settings), tmp_path / "single"))
    assert list(single) == list(range(1, 15))
    run = run_of(one_epoch(log_every=4, **settings), tmp_path / "run", strategy)
    sizes = {step: 4 if step % 7 == 0 else 6 for step in single}  # 40 samples
    for last, mine in logged(run).items():
        since = range(last - 3, last + 1)
        mean = sum(single[step] * sizes[step] for step in since) / sum(
            sizes[step] for step in since
        )
        assert mine == pytest.approx(mean, rel=1e-10)
    norms = logged(
        run_of(one_epoch(log_every=1, **settings), tmp_path / "norms", strategy), "grad_norm"
    )
    assert logged(run, "grad_norm") == {step: norms[step] for step in (4, 8, 12)}, (
        "that of the last step"
    )


def test_logs_are_as_if_the_run_had_not_been_stopped(tmp_path: Path) -> None:
    """Step 13 of 20 is no log; the one after it counts steps 9 to 12 of the first start, too."""
    job = one_epoch(epochs=2, log_every=6, eval_every=None)
    whole = run_of(job, tmp_path / "whole")
    first = run_of(job, tmp_path / "run", steps=9)
    assert list(logged(first)) == [6]
    run = run_of(job, tmp_path, resume=first.folder)
    assert logged(run) == logged(whole) and list(logged(run)) == [6, 12, 18]
    assert same_bits(run.model(), whole.model())


def test_a_rate_is_as_the_scheduler_has_left_it(tmp_path: Path) -> None:
    rate = {
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        "lr_scheduler_every": "step",
    }
    run = run_of(one_epoch(**rate), tmp_path)
    assert logged(run, "lr") == pytest.approx({4: 0.05 / 2**4, 8: 0.05 / 2**8})


def test_logs_are_told_to_functions_and_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told: list[tuple[str, int, dict[str, float]]] = []
    job = one_epoch(
        on_event=[lambda event: told.append((event.kind, event.step, event.metrics))], eval_every=8
    )
    run = run_of(job, tmp_path, tensorboard=True)
    assert [(kind, step) for kind, step, _ in told] == [
        ("started", 0),
        ("logged", 4),
        ("logged", 8),
        ("evaluated", 8),
        ("epoch", 10),
        ("evaluated", 10),
        ("saved", 10),
        ("finished", 10),
    ]
    assert told[1][2]["loss"] == logged(run)[4]
    written = EventAccumulator(str(run.folder)).Reload()
    assert {scalar.step: scalar.value for scalar in written.Scalars("loss")} == pytest.approx(
        logged(run), rel=1e-6
    )
    assert [scalar.step for scalar in written.Scalars("eval_loss")] == [8, 10]


@pytest.mark.parametrize("every", [3, "0.000001 s"])
def test_who_hears_of_a_log_may_stop_the_training(every: Any, tmp_path: Path) -> None:
    def stop(event: Event) -> str | None:
        return "stop" if event.kind == "logged" and event.step >= 3 else None

    run = run_of(one_epoch(log_every=every, eval_every=None, on_event=[stop]), tmp_path, "ddp")
    assert 3 <= run.summary["steps"] < 10 and "eval_loss" in run.history[-1]


def test_epochs_may_be_logged_now_and_then(tmp_path: Path) -> None:
    run = run_of(a_job(epochs=5, log_every="2 epochs", eval_every="3 epochs"), tmp_path)
    assert [record["epoch"] for record in run.history] == [2, 3, 4, 5]


def test_hogwild_logs_what_rank_0_has_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(one_epoch(eval_every=None), strategy="hogwild", devices="2xcpu", folder=tmp_path)
    assert list(logged(run)) == [4, 8]
    assert "losses within an epoch are rank 0's" in " ".join(capsys.readouterr().out.split())


def test_the_line_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(one_epoch(clip_norm=1.0, eval_every=None), devices="1xcpu", folder=tmp_path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 4")]
    parts = (
        r"step 4/10  loss \d\.\d{4}  lr 0\.05  grad norm \d\.\d{4}  [\d,]+ samples/s  0:0\d left"
    )
    assert re.fullmatch(parts, line)


# ---- the best ------------------------------------------------------------------------------------


def wavering(**settings: Any) -> Job:
    """Its metric goes up and down."""
    return a_job(
        optimizer=lambda params: torch.optim.SGD(params, lr=1.5),
        metrics={"accuracy": right},
        **{"epochs": 3, "eval_every": 4, **settings},
    )


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_best_weights_follow_the_metric_that_the_job_names(
    strategy: str, tmp_path: Path
) -> None:
    for best, choose in (("accuracy:max", max), ("accuracy:min", min), ("loss:max", max)):
        run = run_of(wavering(best=best), tmp_path, strategy)
        name = "eval_loss" if best == "loss:max" else "accuracy"
        values = [record[name] for record in run.history if name in record]
        its = evaluate(run.folder, best=True, job=wavering(), devices="1xcpu")
        assert its["loss" if name == "eval_loss" else name] == pytest.approx(
            choose(values), rel=1e-10
        )
        assert len(set(values)) > 1


def test_a_metric_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r'best: there is no "acuracy"; .*"accuracy"'):
        run_of(wavering(best="acuracy:max"), tmp_path)
    assert not list(tmp_path.iterdir())
    for wrong in ("accuracy", "accuracy:more", ":max"):
        with pytest.raises(JobError, match=r"best: .* needs max or min after the metric"):
            wavering(best=wrong)


class Evaluates(Callback):
    """Has a metric of its own, without evaluation data."""

    def on_evaluated(self, training: TrainingContext) -> None:
        training.metrics["distance"] = -training.step


def test_settings_of_evaluations_are_refused_without_evaluation_data(tmp_path: Path) -> None:
    bare = a_job(eval_data=None, epochs=1)
    for name, value in {"best": "accuracy:max", "eval_every": 2}.items():
        with pytest.raises(
            JobError, match=rf"{name}: .*the job has no eval_data.*: give eval_data"
        ):
            run_of(bare.replace(**{name: value}), tmp_path)
    assert not list(tmp_path.iterdir())
    assert run_of(bare.replace(best="train_loss:min"), tmp_path).model(best=True)
    own = bare.replace(best="distance:min", eval_every=5, callbacks=[Evaluates()])
    assert run_of(own, tmp_path).model(best=True)


def test_a_run_that_is_resumed_by_another_metric_looks_for_the_best_anew(
    tmp_path: Path, capsys
) -> None:
    first = run_of(wavering(epochs=1), tmp_path)
    run = train(wavering(best="accuracy:max"), resume=first.folder)
    assert (
        "note: best: it is accuracy:max, and was None when the run was started"
        in capsys.readouterr().out
    )
    values = [
        record["accuracy"] for record in run.history if record["step"] > 10 and "accuracy" in record
    ]
    its = evaluate(run.folder, best=True, job=wavering(), devices="1xcpu")
    assert its["accuracy"] == pytest.approx(max(values))
    again = run_of(wavering(best="accuracy:max", epochs=4), tmp_path, resume=run.folder)
    found = [
        record["accuracy"]
        for record in again.history
        if record["step"] > 10 and "accuracy" in record
    ]
    assert evaluate(again.folder, best=True, job=wavering(), devices="1xcpu")[
        "accuracy"
    ] == pytest.approx(max(found))


# ---- the batch size ------------------------------------------------------------------------------


def test_a_batch_size_beyond_the_data_is_one_step_an_epoch(tmp_path: Path, capfd) -> None:
    train(a_job(batch_size=5000), strategy="dp", devices="2xcpu", folder=tmp_path)
    said = capfd.readouterr().out
    assert "batches of 40 = 20 + 20 over the devices\n40 samples, 1 step an epoch, 30" in said
    assert "note: batch_size: 5,000 is more than the 40 samples: an epoch is one step" in said
