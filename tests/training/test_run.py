"""A run after its training: opened again, its numbers, its model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, Run, evaluate, train
from lockstep.errors import FolderError
from zoo import Conv, drawn, labels, mlp, plain_sgd

FILE = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def job(width: int = 3):
    data = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.Linear(width, 3)),
        loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, eval_data=data,
        batch_size=8, epochs=2)
"""


def job_of(model=mlp, **settings) -> Job:
    data = TensorDataset(drawn(20, 6), labels(20, 3))
    fields = {"eval_data": data, "batch_size": 8, "epochs": 2, **settings}
    return Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, **fields
    )


def test_the_model_of_a_run_is_in_evaluation_mode_with_the_last_or_the_best_weights(
    tmp_path: Path,
) -> None:
    job = job_of(epochs=3)
    run = train(job, folder=tmp_path, quiet=True)
    for best in (False, True):
        model = run.model(best=best)
        assert not any(module.training for module in model.modules())
        inputs, targets = job.eval_data.tensors
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(inputs), targets).item()
        assert evaluate(run, best=best)["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_model_is_in_the_format_that_it_was_trained_in(tmp_path: Path) -> None:
    run = train(job_of(precision="fp64"), folder=tmp_path, quiet=True)
    kept = lockstep.checkpoint.weights.load_weights(run.folder / "model.safetensors")
    model = run.model()
    assert all(
        p.dtype == torch.float64 and torch.equal(p, kept[name])
        for name, p in model.named_parameters()
    )


def test_building_the_model_moves_no_random_stream(tmp_path: Path) -> None:
    run = train(job_of(), folder=tmp_path, quiet=True)
    before = torch.get_rng_state()
    run.model()
    assert torch.equal(before, torch.get_rng_state())


def test_the_run_of_a_job_file_is_opened_with_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text(textwrap.dedent(FILE))
    run = train(
        lockstep.jobfile.JobFile(str(path), {"width": "5"}), folder=tmp_path / "runs", quiet=True
    )
    again = Run.open(run.folder)
    assert again.metrics == run.metrics
    model = again.model()
    assert model[0].out_features == 5
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), run.model().parameters(), strict=True)
    )


def test_the_run_of_a_script_is_opened_with_its_job(tmp_path: Path) -> None:
    run = train(job_of(), folder=tmp_path, quiet=True)
    with pytest.raises(FolderError, match=r"its job was not a file.*Run\.open\(folder, job\)"):
        Run.open(run.folder).model()
    again = Run.open(run.folder, job_of())
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.model().parameters(), run.model().parameters(), strict=True)
    )


def test_a_run_that_is_not_there_or_has_no_such_weights_is_said(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="no run is kept there"):
        Run.open(tmp_path / "nowhere")
    run = train(job_of(eval_data=None), folder=tmp_path, quiet=True)
    with pytest.raises(
        FolderError, match=r"no best weights \(the run had no evaluation set, or lost them\)"
    ):
        run.model(best=True)
    (run.folder / "summary.json").unlink()
    (run.folder / "model.safetensors").unlink()
    stopped = Run.open(run.folder, job_of())
    assert stopped.metrics == {}
    with pytest.raises(FolderError, match="no such weights, since the run was not finished"):
        stopped.model()


def test_running_statistics_are_part_of_the_model(tmp_path: Path) -> None:
    data = TensorDataset(drawn(20, 2, 7, 7), labels(20, 3))
    job = Job(
        model=Conv,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=data,
        batch_size=8,
        sync_batchnorm=True,
    )
    run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert run.model().get_buffer("body.1.num_batches_tracked") == 3
