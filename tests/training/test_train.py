"""A training from the outside: its folder, its numbers, what it tells, and going on with it."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset, TensorDataset

import lockstep
from lockstep import Job, evaluate, train
from lockstep.cli.command import main
from lockstep.errors import FolderError, InputError, JobError, StrategyError
from lockstep.launch.world import current
from lockstep.strategies.ddp import DDP
from zoo import ZOO, drawn, labels, mlp, plain_sgd, right

ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu"}


def classify(**settings) -> Job:
    fields = {
        "model": mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": plain_sgd,
        "train_data": TensorDataset(drawn(50, 6), labels(50, 3)),
        "eval_data": TensorDataset(drawn(21, 6, seed=8), labels(21, 3, seed=9)),
        "batch_size": 8,
        "epochs": 2,
        "metrics": {"accuracy": right},
    }
    return Job(**{**fields, **settings})


@pytest.mark.parametrize("strategy", ON)
def test_a_run_leaves_its_folder(strategy: str, tmp_path: Path) -> None:
    run = train(classify(), strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    assert run.folder.name.startswith(f"job-{strategy}-")
    assert stat.S_IMODE(os.stat(run.folder).st_mode) == 0o700
    files = {path.name for path in run.folder.iterdir()}
    assert files - {"ranks"} == {
        "best.safetensors",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
    }
    summary = json.loads((run.folder / "summary.json").read_text())
    assert set(summary) == {
        "strategy",
        "devices",
        "world_size",
        "epochs",
        "steps",
        "batch_size",
        "shares",
        "shapes",
        "train_samples",
        "eval_samples",
        "loss",
        "metrics",
        "samples_per_second",
        "seconds",
        "peak_memory_bytes",
        "versions",
        "skipped_updates",
    }
    assert (
        summary["epochs"],
        summary["steps"],
        summary["train_samples"],
        summary["eval_samples"],
    ) == (2, 14, 50, 21)
    assert (
        summary["world_size"]
        == len(summary["peak_memory_bytes"])
        == (2 if strategy == "ddp" else 1)
    )
    assert set(run.metrics) == {"loss", "accuracy"}
    config = json.loads((run.folder / "config.json").read_text())
    assert config["settings"]["batch_size"] == 8


def test_the_metrics_are_those_of_counting_each_sample_once(tmp_path: Path) -> None:
    run = train(classify(), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    model = run.model().eval()
    inputs, targets = classify().eval_data.tensors
    outputs = model(inputs)
    assert run.metrics["accuracy"] == (outputs.argmax(dim=1) == targets).sum().item() / 21
    assert run.metrics["loss"] == pytest.approx(
        nn.functional.cross_entropy(outputs, targets).item(), rel=1e-5
    )


def of_torchmetrics() -> dict[str, Any]:
    """Some that no mean over samples gives; sums; one in others; and own ones, of which one
    keeps means of batches.
    """
    import torchmetrics  # in two seconds, and each rank imports this file

    class Right(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.right += (outputs.argmax(dim=1) == targets).sum()

        def compute(self) -> torch.Tensor:
            return self.right

    class OfBatches(Right):
        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.right += (outputs.argmax(dim=1) == targets).float().mean()

    class OfFirst(torchmetrics.PearsonCorrCoef):
        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(outputs[:, 0], targets.float())

    f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    return {
        "f1": f1,
        "scores": torchmetrics.StatScores(task="multiclass", num_classes=3, average="micro"),
        "classes": torchmetrics.ClasswiseWrapper(
            torchmetrics.F1Score(task="multiclass", num_classes=3, average=None)
        ),
        "both": f1.clone() + Right(),
        "right": Right(),
        "correlation": OfFirst(),
        "of batches": OfBatches(),
        "accuracy": right,
    }


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ON)
def test_torchmetrics_are_merged_over_ranks(strategy: str, tmp_path: Path) -> None:
    """Found by trial: sums were so many times too large as there are ranks, and own classes were
    refused.
    """
    values = evaluate(classify(metrics=of_torchmetrics()), strategy=strategy, devices=ON[strategy])
    reference = evaluate(classify(metrics=of_torchmetrics()), strategy="single", devices="1xcpu")
    of_batches = values.pop("of batches"), reference.pop("of batches")
    assert of_batches[0] != of_batches[1] or strategy == "single"
    assert list(values) == list(reference)
    assert values == pytest.approx(reference, rel=1e-5)
    assert values["f1"] == reference["f1"]


def test_evaluating_a_run_gives_what_its_last_epoch_gave(tmp_path: Path) -> None:
    run = train(classify(), strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert evaluate(run, strategy="ddp", devices="3xcpu") == pytest.approx(run.metrics, rel=1e-6)


def test_the_best_weights_are_those_of_the_lowest_evaluation_loss(tmp_path: Path) -> None:
    run = train(
        classify(epochs=4, optimizer=lambda p: torch.optim.SGD(p, lr=2.0)),
        folder=tmp_path,
        quiet=True,
    )
    best = min(record["eval_loss"] for record in run.history)
    assert evaluate(run, best=True)["loss"] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_function_may_stop_the_training(strategy: str, tmp_path: Path) -> None:
    def stop_after_two(event: lockstep.Event) -> str | None:
        return "stop" if event.kind == "evaluated" and event.epoch == 2 else None

    job = classify(epochs=9, on_event=[stop_after_two])
    run = train(job, strategy=strategy, devices=ON[strategy], folder=tmp_path, quiet=True)
    assert run.summary["epochs"] == 2


def test_events_come_in_order_on_rank_0_only(tmp_path: Path) -> None:
    log = tmp_path / "events"

    def note(event: lockstep.Event) -> None:
        with log.open("a") as file:
            file.write(f"{event.kind} {event.epoch} {event.step}\n")

    train(classify(on_event=[note]), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert log.read_text().split("\n")[:-1] == [
        "started 0 0",
        "epoch 1 7",
        "evaluated 1 7",
        "saved 1 7",
        "epoch 2 14",
        "evaluated 2 14",
        "saved 2 14",
        "finished 2 14",
    ]


def test_steps_end_a_training_within_an_epoch(tmp_path: Path) -> None:
    run = train(classify(epochs=None, steps=10), folder=tmp_path, quiet=True)
    assert (run.summary["steps"], run.summary["epochs"]) == (10, 1)


def test_a_scheduler_that_watches_the_loss_is_told_it(tmp_path: Path) -> None:
    job = classify(
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
            o, factor=0.1, patience=0, threshold=1e3
        ),
        epochs=4,
    )
    run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert [record["lr"] for record in run.history] == pytest.approx([0.1, 0.01, 0.001, 0.0001])


def test_a_loss_that_sees_pairs_runs_on_one_device_and_is_refused_on_two(tmp_path: Path) -> None:
    def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    job = classify(loss=contrastive, eval_data=None, metrics={})
    train(job, strategy="single", folder=tmp_path / "single", quiet=True)
    for strategy in ("dp", "ddp"):
        with pytest.raises(
            lockstep.LockstepError, match=r"not a mean over samples.*return \(total, count\)"
        ):
            train(job, strategy=strategy, devices="2xcpu", folder=tmp_path / strategy, quiet=True)
        assert not any((tmp_path / strategy).iterdir()), "nothing is made"


def test_a_dataset_function_runs_on_the_first_rank_before_the_others(tmp_path: Path) -> None:
    made = tmp_path / "downloaded"

    def data() -> TensorDataset:
        if not made.exists():  # only one process may come here
            with made.open("x"):
                pass
        return TensorDataset(drawn(16, 6), labels(16, 3))

    train(
        classify(train_data=data),
        strategy="ddp",
        devices="3xcpu",
        folder=tmp_path / "runs",
        quiet=True,
    )


def shorter_on_rank_1() -> TensorDataset:
    count = 24 - current().rank
    return TensorDataset(drawn(count, 6), labels(count, 3))


def split_by_rank() -> Subset:
    """As a split is that nobody seeded."""
    generator = torch.Generator().manual_seed(current().rank)
    return Subset(
        TensorDataset(drawn(40, 6), labels(40, 3)),
        torch.randperm(40, generator=generator)[:24].tolist(),
    )


def drawn_by_rank() -> TensorDataset:
    return TensorDataset(drawn(24, 6, seed=current().rank), labels(24, 3))


@pytest.mark.parametrize("field", ["train_data", pytest.param("eval_data", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(
            shorter_on_rank_1,
            "it has 24 samples on rank 0 and 23 on rank 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            split_by_rank,
            "the samples on rank 1 differ from those on rank 0",
            marks=pytest.mark.slow,
        ),
        (drawn_by_rank, "the samples on rank 1 differ from those on rank 0"),
    ],
)
def test_ranks_that_have_different_data_are_stopped(
    data, said: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=f"^{field}: {said}"):
        train(
            classify(**{field: data}), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True
        )


def test_the_exceptions_from_the_law_are_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job = ZOO["convolutions with sync_batchnorm"]
    train(job, strategy="dp", devices="2xcpu", folder=tmp_path, sync_batchnorm=False, epochs=1)
    out = capsys.readouterr().out
    assert out.count("BatchNorm normalizes over each replica's local batch") == 1
    assert "8 = 4 + 4 over the devices" in out
    train(job, strategy="dp", devices="2xcpu", folder=tmp_path, epochs=1)
    assert "note:" not in capsys.readouterr().out


def test_resuming_with_another_seed_or_batch_is_refused(tmp_path: Path) -> None:
    run = train(classify(epochs=1), folder=tmp_path, quiet=True)
    with pytest.raises(JobError, match="seed: the run was made with 0, not 5"):
        train(classify(), resume=run.folder, seed=5, quiet=True)
    with pytest.raises(JobError, match="epochs: the run has reached epoch 1 "):
        train(classify(epochs=1), resume=run.folder, quiet=True)
    assert run.folder.is_dir(), "what was there is kept"


def test_a_refused_resume_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    run = train(classify(epochs=1), folder=tmp_path, quiet=True)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    with pytest.raises(JobError):
        train(classify(), resume=run.folder, seed=5, quiet=True, tensorboard=True)
    with pytest.raises(lockstep.LockstepError, match="is different"):
        train(classify(model=lambda: nn.Linear(6, 3)), resume=run.folder, quiet=True)
    assert {
        path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()
    } == before


def test_a_schedule_at_its_end_is_said_by_a_resume(tmp_path: Path, capsys) -> None:
    def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    job = classify(epochs=1, lr_scheduler=cosine, lr_scheduler_every="step")
    run = train(job, folder=tmp_path)
    assert "learning rate is 0" not in capsys.readouterr().out
    train(job, resume=run.folder, epochs=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "note: the learning rate is 0, as the scheduler was saved at its end" in said


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    run = train(classify(epochs=1), folder=tmp_path, quiet=True)
    other = lockstep.Run(
        run.folder, run.summary, classify(model=lambda: nn.Sequential(nn.Linear(6, 3)))
    )
    says = r"weights of another model: of another shape in the file: 0\.bias .*; not of this model in the file: 2\.bias"
    with pytest.raises(FolderError, match=says):
        other.model()


def test_a_function_that_returns_a_job_is_as_good_as_the_job(tmp_path: Path) -> None:
    assert train(lambda: classify(), folder=tmp_path, quiet=True, epochs=1).summary["epochs"] == 1
    with pytest.raises(JobError, match="not int"):
        train(lambda: 3, folder=tmp_path, quiet=True)  # type: ignore[arg-type,return-value]


def test_single_on_two_devices_and_a_strategy_that_does_not_exist_are_refused() -> None:
    with pytest.raises(StrategyError, match="single uses one device, not 2"):
        train(classify(), strategy="single", devices="2xcpu")
    with pytest.raises(StrategyError, match='no strategy "dddp": did you mean "ddp"'):
        train(classify(), strategy="dddp")


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    run = train(classify(), folder=tmp_path, quiet=True, tensorboard=True)
    assert any(path.name.startswith("events.out") for path in run.folder.iterdir())


TINY_JOB = """
import lockstep, torch

def job():
    data = torch.utils.data.TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64))
    return lockstep.Job(
        model=lambda: torch.nn.Linear(6, 3), loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, batch_size=4)
"""


def test_tensorboard_is_a_setting_that_a_resumed_run_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an option of the command, and a resumed run wrote no more events without a line."""
    (tmp_path / "tiny.py").write_text(TINY_JOB)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny.py", "--tensorboard", "--devices", "1xcpu"]) == 0
    (folder,) = tmp_path.glob("runs/*")
    assert json.loads((folder / "config.json").read_text())["settings"]["tensorboard"] is True
    (events,) = folder.glob("events.out*")
    events.unlink()
    assert main(["train", "--resume", str(folder), "--epochs", "2"]) == 0
    assert len(list(folder.glob("events.out*"))) == 1
    assert main(["train", "--resume", str(folder), "--epochs", "3", "--tensorboard", "false"]) == 0
    assert len(list(folder.glob("events.out*"))) == 1


@pytest.mark.slow
def test_a_metric_of_several_values_gives_each_a_name(tmp_path: Path) -> None:
    import torchmetrics

    metrics = {
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="none"),
        "accuracy": right,
    }
    job = ZOO["mlp"].replace(metrics=metrics)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    two = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert list(one.metrics) == ["loss", "f1/0", "f1/1", "f1/2", "accuracy"]
    assert one.metrics == pytest.approx(two.metrics)


def test_what_a_model_keeps_beside_its_tensors_comes_back(tmp_path: Path) -> None:
    for kind in ("a buffer that counts and extra state", "complex parameters", "lazy layers"):
        run = train(
            ZOO[kind].replace(precision="fp64"),
            strategy="ddp",
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
        )
        model = run.model()
        resumed = train(
            ZOO[kind].replace(precision="fp64", epochs=3),
            strategy="dp",
            devices="2xcpu",
            resume=run.folder,
            quiet=True,
        )
        assert resumed.summary["epochs"] == 3
        if kind == "complex parameters":
            assert model.turn.dtype == torch.complex128
        if kind == "a buffer that counts and extra state":
            assert model.get_extra_state()["shift"].tolist() == [0, 1, 2]
        if kind == "lazy layers":
            assert model[0].weight.shape == (16, 6)


@pytest.mark.parametrize("by_batches", [False, True])
def test_ranks_of_an_own_loop_draw_masks_of_their_own_and_leave_the_scripts_numbers_alike(
    by_batches: bool,
) -> None:
    def loop(world: lockstep.World) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        seen: list[torch.Tensor] = []
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))
        model[1].register_forward_hook(
            lambda module, inputs, output: seen.append(output.detach() == 0)
        )
        step = lockstep.parallelize(model, nn.CrossEntropyLoss(), plain_sgd)
        if by_batches:
            data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64))
            step(next(iter(lockstep.batches(data, batch_size=8))))
        else:
            step(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64))
        return seen[-1], torch.rand(3)

    (mine, drawn_first), (theirs, drawn_second) = lockstep.launch(loop, devices="2xcpu")
    assert not torch.equal(mine, theirs)
    assert torch.equal(drawn_first, drawn_second)


def test_a_reentrant_checkpoint_is_told_what_to_do_under_overlapped_ddp(tmp_path: Path) -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            return self.out(x)

    job = dataclasses.replace(ZOO["mlp"], model=Reentrant)
    with pytest.raises(StrategyError, match="use_reentrant=False"):
        train(job, strategy=DDP(reduce="overlapped"), devices="2xcpu", folder=tmp_path, quiet=True)
    train(job, strategy=DDP(reduce="flat"), devices="2xcpu", folder=tmp_path, quiet=True)


def test_parallelize_serves_a_loop_of_ones_own() -> None:
    data = TensorDataset(drawn(40, 6), labels(40, 3))

    def loop(strategy: str, devices: str) -> list[float]:
        torch.manual_seed(0)
        model = mlp().double()
        step = lockstep.parallelize(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=strategy,
            devices=devices,
            precision="fp64",
        )
        return [
            step(inputs, targets).loss for inputs, targets in lockstep.batches(data, batch_size=12)
        ]

    assert loop("dp", "3xcpu") == pytest.approx(loop("single", "1xcpu"), abs=1e-12)


@pytest.mark.parametrize(
    "settings", [{"strategy": "dp", "devices": "2xcpu"}, {"devices": "1xcpu", "accumulate": 2}]
)
def test_inputs_whose_first_dimension_is_time_are_not_cut_along_it(settings) -> None:
    class Last(nn.GRU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[0][-1]

    model = Last(6, 3)
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), **settings
    )
    with pytest.raises(
        InputError,
        match=r"targets: a tensor of shape \(8,\) cannot be cut into 4 samples: the first",
    ):
        step(drawn(4, 8, 6), labels(8, 3))


def test_parallelize_inside_a_launch_is_ddp() -> None:
    data = TensorDataset(drawn(41, 6), labels(41, 3))

    def loop(world: lockstep.World, whole: bool) -> list[float]:
        torch.manual_seed(0)
        step = lockstep.parallelize(
            mlp(), nn.CrossEntropyLoss(), plain_sgd, precision="fp64", clip_norm=0.1
        )
        found = []
        for batch in lockstep.batches(data, batch_size=12):
            inputs, targets = batch
            found.append((step(batch) if whole else step(inputs, targets)).loss)
        return found

    reference = lockstep.launch(loop, devices="1xcpu", args=(True,))[0]
    for whole in (True, False):
        for losses in lockstep.launch(loop, devices="2xcpu", args=(whole,)):
            assert losses == pytest.approx(reference, abs=1e-12)


OWN_LOOP = """
import json, torch, lockstep
from torch.utils.data import Subset, TensorDataset
generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(41, 6, generator=generator), torch.randint(3, (41,), generator=generator))
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
step = lockstep.parallelize(
    model, torch.nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.5), devices="1xcpu", precision="fp64"
)
losses = [step(inputs, targets).loss for inputs, targets in lockstep.batches(data, batch_size=8)]
if step.world.rank == 0:
    print(step.world.size, json.dumps(losses))
"""


@pytest.mark.slow
def test_a_plain_loop_is_ddp_under_torchrun_and_single_without(tmp_path: Path, capsys) -> None:
    script = tmp_path / "loop.py"
    script.write_text(OWN_LOOP)
    under = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(under, capture_output=True, text=True, check=True, timeout=100)
    runpy.run_path(str(script))
    found = {}
    for out in (done.stdout, capsys.readouterr().out):
        size, losses = out.split(" ", 1)
        found[int(size)] = json.loads(losses)
    assert found[2] == pytest.approx(found[1], abs=1e-12)


def test_a_metric_that_gives_no_numbers_is_named(tmp_path: Path) -> None:
    job = classify(
        metrics={
            "vector": lambda outputs, targets: (outputs.argmax(dim=1) == targets, len(targets))
        }
    )
    with pytest.raises(
        JobError,
        match=r'metrics: "vector" gave a tensor of shape \(\d,\) .*: sum it over the samples',
    ):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    with pytest.raises(JobError, match="metrics: \"word\" gave 'good' in"):
        evaluate(classify(metrics={"word": lambda outputs, targets: ("good", 3)}), devices="1xcpu")
    assert not list(tmp_path.iterdir())
