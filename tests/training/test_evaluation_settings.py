"""``eval_at_start`` and ``eval_batches``: when a training evaluates, and how much."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Event, Job
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import JobError

from harness import same_bits, trained  # isort: skip
from zoo import ZOO, sgd, slow


def job(**settings: Any) -> Job:
    return ZOO["mlp"].replace(precision="fp64", optimizer=sgd, **settings)


@pytest.mark.parametrize("way", ["single", "ddp", slow("dp"), slow("pp"), slow("hogwild")])
def test_an_evaluation_at_the_start_is_that_of_the_initial_weights(
    way: str, tmp_path: Path
) -> None:
    run = trained(job(eval_at_start=True), tmp_path, way)
    first = run.history[0]
    assert (first["epoch"], first["step"]) == (1, 0)
    assert "train_loss" not in first
    untrained = lockstep.evaluate(job(), devices="1xcpu")
    assert first["eval_loss"] == pytest.approx(untrained["loss"], rel=1e-12)
    assert first["accuracy"] == untrained["accuracy"]


def test_an_evaluation_at_the_start_changes_nothing_that_follows(tmp_path: Path) -> None:
    """A scheduler of epochs isn't given its loss, either: 0.0 would be the best one for ever."""
    its = job(
        lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        eval_every="2 epochs",
        epochs=4,
    )
    without = trained(its, tmp_path, "ddp")
    run = trained(its, tmp_path, "ddp", eval_at_start=True)
    assert same_bits(run.model(), without.model())
    assert [record["lr"] for record in run.history[1:]] == [
        record["lr"] for record in without.history
    ]


def test_the_weights_at_the_start_may_be_the_best_and_a_run_resumes_from_them(
    tmp_path: Path,
) -> None:
    its = job(eval_at_start=True)
    whole = trained(its, tmp_path, "single")

    def fail(event: Event) -> None:
        if event.kind == "epoch":
            raise RuntimeError("as if the machine had stopped")

    with pytest.raises(RuntimeError):
        trained(its.replace(on_event=[fail]), tmp_path / "failed", "single")
    (folder,) = (tmp_path / "failed").iterdir()
    torch.manual_seed(0)
    initial = dict(its.model().double().named_parameters())
    assert all(
        torch.equal(initial[name], value)
        for name, value in load_weights(folder / "best.safetensors").items()
    )
    run = trained(its, tmp_path, "single", resume=folder)
    assert same_bits(run.model(), whole.model())
    assert [record["step"] for record in run.history] == [0, 4, 8]


@pytest.mark.parametrize("way", ["single", "ddp", slow("dp"), slow("pp")])
def test_a_part_of_an_evaluation_set_is_its_first_batches(way: str, tmp_path: Path) -> None:
    its = job(eval_batches=2, eval_batch_size=5)
    run = trained(its, tmp_path, way)
    part = TensorDataset(*its.eval_data[:10])
    assert run.metrics["loss"] == pytest.approx(
        lockstep.evaluate(run, devices="1xcpu", eval_data=part)["loss"], rel=1e-12
    )
    assert run.summary["eval_samples"] == 10
    whole = lockstep.evaluate(run, devices="1xcpu")
    assert whole == lockstep.evaluate(run, devices="1xcpu", eval_batches=99)
    assert whole["loss"] != pytest.approx(run.metrics["loss"], rel=1e-3)
    shutil.rmtree(run.folder)


@pytest.mark.parametrize("setting", [{"eval_at_start": True}, {"eval_batches": 3}])
def test_a_job_without_evaluation_data_has_no_settings_of_evaluations(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = setting
    with pytest.raises(JobError, match=f"{name}: the job has no eval_data to evaluate"):
        trained(job(eval_data=None, **setting), tmp_path)
