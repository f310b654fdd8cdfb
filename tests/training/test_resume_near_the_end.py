"""How a run ends that was stopped near its end, or of which something was changed or lost before
it was taken up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from lockstep import Callback, Job, Run, train
from lockstep.callbacks import EarlyStopping
from lockstep.checkpoint import weights
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.errors import FolderError, JobError, LockstepError, SaveError
from lockstep.jobfile import JobFile
from lockstep.run.run_folder import RunFolder
from lockstep.strategies.steps import saved_state
from lockstep.training.callbacks.callback import TrainingContext
from lockstep.training.records.audit import added_up
from lockstep.training.resume import newest_of

from harness import same_bits  # isort: skip
from zoo import drawn, labels, slow

BATCHES = 5
"""Of an epoch."""


class Died(Exception):
    """What a function raises where the process would die."""


def a_job(lr: float = 0.05, **settings: Any) -> Job:
    inputs, targets = drawn(40, 6), labels(40, 3)
    usual: dict[str, Any] = {"epochs": 3, "precision": "fp64"}
    return Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        train_data=TensorDataset(inputs, targets),
        eval_data=TensorDataset(inputs[:30], targets[:30]),
        batch_size=8,
        **(usual | settings),
    )


def dying(at: str, step: int) -> Callable[..., None]:
    def function(event: Any) -> None:
        if (event.kind, event.step) == (at, step):
            raise Died

    return function


def begun(
    job: Job, folder: Path, at: str, step: int, strategy: str = "single", devices: str = "1xcpu"
) -> Path:
    """The folder of a run that died in this event."""
    dies = job.replace(on_event=[dying(at, step)])
    with pytest.raises((Died, LockstepError)):
        train(dies, strategy=strategy, devices=devices, folder=folder, quiet=True)
    (run,) = folder.iterdir()
    return run


def resumed(job: Job, run: Path, **settings: Any) -> Run:
    return train(job, resume=run, quiet=True, **settings)


def same(run: Run, whole: Run) -> None:
    assert same_bits(run.model(), whole.model()) and same_bits(
        run.model(best=True), whole.model(best=True)
    )
    assert [(r["step"], r["train_loss"], r["eval_loss"]) for r in run.history] == [
        (r["step"], pytest.approx(r["train_loss"]), pytest.approx(r["eval_loss"]))
        for r in whole.history
    ]
    assert run.summary["loss"] == pytest.approx(whole.summary["loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [8, 10])
@pytest.mark.parametrize(("strategy", "devices"), [("single", "1xcpu"), ("ddp", "2xcpu")])
def test_who_died_in_the_last_evaluation_is_evaluated(
    strategy: str, devices: str, steps: int, tmp_path
) -> None:
    """Of a number of steps; the run once ended with the numbers of the epoch before, and its
    best weights.
    """
    job = a_job(epochs=None, steps=steps, save_every=2)
    run = begun(job, tmp_path / "runs", "epoch", steps, strategy, devices)
    whole = train(job, strategy=strategy, devices=devices, folder=tmp_path / "whole", quiet=True)
    same(resumed(job, run), whole)


class Halving(Callback):
    """Halves the rate after every evaluation, and stops after so many."""

    def __init__(self) -> None:
        self._seen = 0

    def on_log(self, training: TrainingContext) -> None:
        for group in training.optimizer.param_groups:
            group["weight_decay"] += 0.01

    def on_evaluated(self, training: TrainingContext) -> None:
        self._seen += 1
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.5
        if self._seen == 9:
            training.stop("it has seen nine")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Any) -> None:
        self._seen = state["seen"]


@pytest.mark.sweep
@pytest.mark.parametrize("every", [None, "2epochs", 3])
@pytest.mark.parametrize(
    ("strategy", "first"),
    [
        ("single", {"steps": 8}),
        ("single", {"steps": 15}),
        ("single", {"epochs": 3}),
        slow("ddp", {"steps": 12}),
        slow("dp", {"steps": 8}),
        slow("ddp", {"epochs": 3}),
    ],
)
def test_the_evaluation_that_a_run_ends_with_moves_nothing_of_a_resumed_one(
    strategy: str, first: dict[str, int], every: Any, tmp_path: Path
) -> None:
    """Schedulers and callbacks went by it, which a run that wasn't stopped doesn't make."""
    place = {"strategy": strategy, "devices": "1xcpu" if strategy == "single" else "2xcpu"}
    job = a_job(
        epochs=None,
        callbacks=[Halving(), EarlyStopping(patience=6, min_delta=1.0)],
        save_every="1epochs",
        lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        **({} if every is None else {"eval_every": every}),
    )
    whole = train(job.replace(epochs=8), folder=tmp_path / "whole", quiet=True, **place)
    run = train(job.replace(**first), folder=tmp_path / "runs", quiet=True, **place)
    last = run.history[-1]
    assert last["step"] == run.summary["steps"] and last["eval_loss"] == run.metrics["loss"]
    run = resumed(job.replace(epochs=8), run.folder)
    assert same_bits(run.model(), whole.model())
    kept = {record["step"]: record for record in run.history}
    assert len(kept) == len(run.history)
    for record in whole.history:
        for name in record.keys() & {"lr", "eval_loss", "train_loss"}:
            assert kept[record["step"]][name] == record[name], name


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, slow(torch.optim.ASGD), slow(torch.optim.RAdam)]
)
def test_numbers_that_an_optimizer_keeps_have_their_format_after_a_resume(
    kind: Any, tmp_path: Path
) -> None:
    """PyTorch gave the float32 ones of NAdam and ASGD that of the parameters, float64."""
    job = a_job().replace(optimizer=lambda p: kind(p, lr=0.02))
    whole = train(job, folder=tmp_path / "whole", quiet=True)
    run = train(job.replace(epochs=1), folder=tmp_path / "runs", quiet=True)
    assert same_bits(resumed(job, run.folder).model(), whole.model())


def test_a_log_in_the_step_that_a_run_ends_with_stays(tmp_path: Path) -> None:
    job = a_job(epochs=2, log_every=4, eval_every=4)
    whole = train(job, folder=tmp_path / "whole", quiet=True)
    run = resumed(job, train(job.replace(steps=8), folder=tmp_path / "runs", quiet=True).folder)
    both = [{of["step"]: of for of in one.history} for one in (whole, run)]
    assert [len(one.history) for one in (whole, run)] == [len(of) for of in both], (
        "a line for each step"
    )
    for step in (4, 5, 8, 10):
        for name in both[0][step].keys() & {"loss", "lr", "train_loss", "eval_loss"}:
            assert both[0][step][name] == both[1][step][name], (step, name)


def test_who_died_after_the_last_checkpoint_is_evaluated_once(tmp_path: Path, monkeypatch) -> None:
    """It lies before that evaluation, where none was due."""
    job = a_job(eval_every="2epochs")
    whole = train(job, folder=tmp_path / "whole", quiet=True)
    with monkeypatch.context() as dies:
        dies.setattr(saved_state, "save_weights", lambda *args, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(job, folder=tmp_path / "runs", quiet=True)
    (run,) = (tmp_path / "runs").iterdir()
    same_history = [record["step"] for record in resumed(job, run).history]
    assert same_history == [record["step"] for record in whole.history] == [5, 10, 15]
    assert resumed(job.replace(epochs=4), run).summary["epochs"] == 4


def test_the_best_weights_may_be_those_that_a_run_ends_with(tmp_path: Path) -> None:
    job = a_job(eval_every="2epochs")
    run = train(job, folder=tmp_path, quiet=True)
    best = run.model()
    assert same_bits(run.model(best=True), best)
    inputs, targets = job.eval_data.tensors
    kept = resumed(
        job.replace(epochs=4, eval_data=TensorDataset(inputs, (targets + 1) % 3)), run.folder
    )
    assert kept.metrics["loss"] > run.metrics["loss"]
    assert same_bits(kept.model(best=True), best)


FILE = """
from test_resume_near_the_end import a_job

def job(lr: float = 0.05):
    return a_job(lr)
"""


def a_file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FILE)
    return str(tmp_path / "own.py")


def test_auto_takes_a_finished_run_that_was_being_continued(tmp_path: Path, monkeypatch) -> None:
    """The summary of its first end was taken for that of the second."""
    file, runs = a_file(tmp_path), tmp_path / "runs"
    run = train(JobFile(file), folder=runs, quiet=True)
    more = JobFile(file, settings={"epochs": 5})
    assert newest_of(runs, JobFile(file), "own") is None
    monkeypatch.setattr(
        saved_state, "save_weights", lambda *args, **how: 1 / 0
    )  # dies after its last step
    with pytest.raises(ZeroDivisionError):
        train(more, resume=run.folder, quiet=True)
    assert newest_of(runs, more, "own").path == run.folder


def test_auto_takes_no_run_of_other_parameters(tmp_path: Path, capfd) -> None:
    file, runs = a_file(tmp_path), tmp_path / "runs"
    run = train(JobFile(file, {"lr": "0.5"}), folder=runs, quiet=True)
    longer = {"epochs": 4}
    assert newest_of(runs, JobFile(file, {"lr": "0.5"}, longer), "own").path == run.folder
    assert newest_of(runs, JobFile(file, {"lr": "0.1"}, longer), "own") is None
    assert newest_of(runs, JobFile(file, {}, longer), "own") is None
    train(JobFile(file, {"lr": "0.1"}, longer), resume=run.folder)
    said = capfd.readouterr()
    assert "note: --set lr: it is 0.1, and was 0.5 when the run was started" in said.out + said.err
    assert "note: lr: the optimizer resumes with the saved 0.5, not 0.1" in said.out + said.err


@pytest.mark.parametrize("at", ["evaluated", "saved"])
def test_what_a_function_has_stopped_stays_stopped(
    at: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    def stops(event: Any) -> str | None:
        return "stop" if event.kind == at and event.epoch >= 2 else None

    job = a_job(epochs=4, on_event=[stops])
    with monkeypatch.context() as dies:
        dies.setattr(saved_state, "save_weights", lambda *args, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(job, folder=tmp_path, quiet=True)
    (run,) = tmp_path.iterdir()
    assert [record["epoch"] for record in resumed(job, run).history] == [1, 2]
    assert [record["epoch"] for record in train(job, resume=run).history] == [1, 2, 3]
    assert "on_event stopped the run after 2 epochs; the run resumes" in "".join(capfd.readouterr())


def test_asking_for_less_than_was_done_is_refused(tmp_path: Path) -> None:
    job = a_job(save_every=3)
    run = begun(job, tmp_path, "epoch", 2 * BATCHES)
    for asked in ({"epochs": 1}, {"steps": 6}):
        with pytest.raises(JobError, match=r"the run has reached .*give more"):
            resumed(job.replace(**asked), run)
    assert resumed(job, run).summary["epochs"] == 3


# ---- files that were lost ------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_best_weights_that_were_lost_are_looked_for_anew(
    damaged: bool, tmp_path: Path, capfd
) -> None:
    job = a_job()
    run = begun(job, tmp_path, "epoch", 2 * BATCHES)
    best = run / "best.safetensors"
    if damaged:
        with best.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\1\2\3")
    else:
        best.unlink()
    train(job, resume=run)
    assert "the best weights are looked for anew from here on" in "".join(capfd.readouterr())
    weights.load_weights(best)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_weights_of_a_finished_run_are_written_anew(damaged: bool, tmp_path: Path) -> None:
    """The advice was given, and led to a refusal."""
    job = a_job()
    run = train(job, folder=tmp_path, quiet=True)
    path = run.folder / "model.safetensors"
    whole = {name: value.clone() for name, value in weights.load_weights(path).items()}
    if damaged:
        path.write_bytes(path.read_bytes()[:-4] + b"\0\1\2\3")
        with pytest.raises(FolderError, match="--resume the run, which writes it anew"):
            weights.load_weights(path)
    else:
        path.unlink()
    resumed(job, run.folder)
    assert all(
        torch.equal(value, whole[name]) for name, value in weights.load_weights(path).items()
    )
    with pytest.raises(JobError, match="the run has reached epoch 3"):
        resumed(job, run.folder)


def test_a_death_between_two_renames_leaves_a_run_to_resume(tmp_path: Path) -> None:
    job = a_job(keep=1)
    run = begun(job, tmp_path, "epoch", 2 * BATCHES)
    checkpoints = run / "checkpoints"
    (checkpoints / "step-5").rename(checkpoints / ".step-5.before")
    assert RunFolder(run).is_resumable
    assert resumed(job, run).summary["epochs"] == 3


def test_what_was_set_aside_is_nothing_to_resume(tmp_path: Path) -> None:
    job = a_job(keep=2)
    run = begun(job, tmp_path, "epoch", 3 * BATCHES)
    for step in (5, 10):
        (run / "checkpoints" / f"step-{step}" / "index.json").write_text("{}")
    with pytest.raises(FolderError, match=r"all checkpoints are damaged.*step-10.*step-5"):
        resumed(job, run)
    assert not RunFolder(run).is_resumable
    with pytest.raises(FolderError, match="there is no checkpoint to resume from"):
        CheckpointFolder(run / "checkpoints").newest(print)


def test_records_that_were_lost_are_said(tmp_path: Path, capfd) -> None:
    job = a_job()
    run = begun(job, tmp_path, "epoch", 3 * BATCHES)
    (run / "metrics.jsonl").unlink()
    assert [record["epoch"] for record in train(job, resume=run).history] == [2, 3]
    assert "1 of the 2 records are there, the others are lost" in "".join(capfd.readouterr())


def test_an_audit_goes_on_and_says_where_it_began(tmp_path: Path) -> None:
    job = a_job()
    run = begun(job, tmp_path / "audited", "epoch", 2 * BATCHES)
    resumed(job, run, audit=True)
    lines, right = added_up(run)
    assert right and lines[1] == f"steps 1 to {BATCHES} were trained without --audit"
    whole = train(job, folder=tmp_path / "first", quiet=True, audit=True)
    resumed(job.replace(epochs=4), whole.folder)
    lines, right = added_up(whole.folder)
    assert right and lines[-1] == "epoch 4: 40 samples, each once"


def test_a_full_disk_under_the_best_weights_advises_to_resume_where_that_can_be_done(
    tmp_path: Path, monkeypatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "write_tensors", full)
    for advice in ("begin anew", "--resume the run"):
        if advice != "begin anew":
            (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
        with pytest.raises(SaveError, match=f"the disk is full; free some space, then {advice}"):
            weights.save_weights(tmp_path / "best.safetensors", {"a": torch.ones(2)})
