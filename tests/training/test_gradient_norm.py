"""The norm of the gradients in each log within an epoch, without clipping."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import TrainingContext
from lockstep.strategies.steps.step import Step

from harness import same_bits, trained  # isort: skip
from zoo import ZOO, drawn, labels, mlp, plain_sgd, sgd, slow


def job(**settings: Any) -> Job:
    kind = ZOO["ignored tokens and tied weights"]
    return kind.replace(precision="fp64", optimizer=sgd, eval_data=None, **settings)


class Norms(Callback):
    """Computes the norm of the gradients that the optimizer was given, after each update."""

    def on_step(self, training: TrainingContext) -> None:
        grads = [p.grad for p in training.model.parameters()]
        training.metrics["norm"] = float(nn.utils.get_total_norm(grads))
        with open(training.folder / "norms", "a") as file:
            file.write(f"{training.metrics['norm']!r}\n")


def logged(run: lockstep.Run) -> dict[int, float]:
    return {record["step"]: record["grad_norm"] for record in run.history if "loss" in record}


@pytest.mark.parametrize(
    ("way", "devices", "every"),
    [
        ("single", 1, "0.5 epochs"),
        ("ddp", 2, 3),
        ("fsdp", 2, "0.000001 s"),
        slow("dp", 3, 3),
        slow("fsdp", 2, 3),
        slow("pp", 2, 3),
        slow("ddp=2xpp=2", 4, 3),
        slow("ddp=2xpp=2", 4, "0.000001 s"),
        slow("ddp=2xfsdp=2", 4, "0.000001 s"),
    ],
)
def test_a_log_has_the_norm_of_its_update(
    way: str, devices: int, every: Any, tmp_path: Path
) -> None:
    """Logs after a time are those of fsdp's ranks together: the norm is a sum over them."""
    expected = trained(job(callbacks=[Norms()]), tmp_path / "expected", accumulate=2)
    norms = map(float, (expected.folder / "norms").read_text().split())
    of_steps = dict(enumerate(norms, start=1))
    run = trained(job(log_every=every), tmp_path, way, devices=f"{devices}xcpu", accumulate=2)
    found = logged(run)
    assert len(found) >= 2
    for step, norm in found.items():
        assert norm == pytest.approx(of_steps[step], rel=1e-10)
    if way == "single":
        assert same_bits(run.model(), expected.model())


def test_only_updates_that_are_logged_compute_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    clip = Step._clip

    def counted(step: Step, clip_norm: float) -> None:
        computed.append(step.world.step)
        clip(step, clip_norm)

    monkeypatch.setattr(Step, "_clip", counted)
    trained(job(log_every=3), tmp_path)
    assert computed == [3, 6]
    trained(job(), tmp_path)
    assert computed == [3, 6]


def test_an_infinite_clip_norm_computes_the_norm_and_clips_nothing(tmp_path: Path) -> None:
    run = trained(job(clip_norm=math.inf, log_every=4), tmp_path, "ddp")
    plain = trained(job(log_every=4), tmp_path, "ddp")
    assert logged(run) == logged(plain)
    assert same_bits(run.model(), plain.model())

    torch.manual_seed(0)
    model = mlp()
    step = lockstep.parallelize(model, nn.CrossEntropyLoss(), plain_sgd, clip_norm=math.inf)
    step(drawn(8, 6), labels(8, 3))
    grads = [p.grad for p in model.parameters()]
    assert step.grad_norm == nn.utils.get_total_norm(grads)


def test_a_norm_leaves_sparse_gradients_as_they_are(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3))

    its = job().replace(
        model=build,
        loss=nn.CrossEntropyLoss(),
        train_data=torch.utils.data.TensorDataset(
            torch.arange(90).view(18, 5).square() % 7, labels(18, 3)
        ),
        optimizer=plain_sgd,
    )
    runs = [trained(its, tmp_path), trained(its, tmp_path, log_every=1)]
    assert same_bits(*(run.model() for run in runs))
