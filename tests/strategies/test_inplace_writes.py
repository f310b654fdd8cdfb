"""A loss, or a forward, that writes to what it is given is given its own; found by trial:
errors, and false notes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep import Job, train

from harness import differences  # isort: skip
from zoo import SAMPLES, ZOO, drawn, labels, mlp, right, sgd  # isort: skip

WAYS = {
    "single": {"strategy": "single", "devices": "1xcpu"},
    "accumulate": {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
    "dp": {"strategy": "dp", "devices": "2xcpu"},
    "ddp": {"strategy": "ddp", "devices": "2xcpu"},
    "pp": {"strategy": "pp", "devices": "2xcpu", "accumulate": 2},
}


class Named(nn.Module):
    """Outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.body(x)
        return {"logits": outputs, "size": outputs.square().sum(1)}


def numbered_from_one(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    targets -= 1
    return F.cross_entropy(outputs["logits"], targets)


def with_a_sentinel(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    if (targets == 3).any():  # of some batches only
        targets[targets == 3] = 0
    return F.cross_entropy(outputs["logits"], targets)


def tempered(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    outputs["logits"] /= 2
    return F.cross_entropy(outputs["logits"], targets % 3, reduction="sum"), len(targets)


class Taking:
    """An object that takes its own outputs away, and adds the others up."""

    weight = 0.1

    def __init__(self) -> None:
        self.others = ["size"]

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return (
            F.cross_entropy(outputs.pop("logits"), targets % 3)
            + self.weight * outputs["size"].mean()
        )


LOSSES = [numbered_from_one, with_a_sentinel, tempered, Taking()]


def job_of(loss: Any) -> Job:
    data = TensorDataset(drawn(SAMPLES, 6), 1 + labels(SAMPLES, 3).clamp(max=2))
    evaluated = loss is not tempered  # so that the first call is that of a training once
    job = dataclasses.replace(
        ZOO["mlp"], model=Named, loss=loss, train_data=data, optimizer=sgd, metrics={}
    )
    return job.replace(eval_data=data if evaluated else None, precision="fp64", shuffle=False)


def by_a_plain_loop(job: Job, model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    inputs, targets = job.train_data.tensors
    for _ in range(2):
        for x, y in zip(inputs.split(8), targets.split(8), strict=True):
            optimizer.zero_grad()
            value = job.loss(model(x.double()), y.clone())
            (value[0] / value[1] if isinstance(value, tuple) else value).backward()
            optimizer.step()
    return model


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: getattr(loss, "__name__", "taking"))
def test_a_loss_may_write_to_outputs_and_targets(
    loss: Any, way: str, tmp_path: Path, capsys: Any
) -> None:
    """Found by trial: single ended in an error of autograd, others said that the loss was no
    mean over samples.
    """
    job = job_of(loss)
    run = train(job, **WAYS[way], folder=tmp_path)
    said = capsys.readouterr().out
    of_loss = [line for line in said.splitlines() if line.startswith("note") and "loss" in line]
    assert all(line.startswith("note: the loss check runs in one of") for line in of_loss)
    torch.manual_seed(0)
    plain = by_a_plain_loop(job, Named().double())
    for mine, its in zip(run.model().parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-12)


class InPlace(nn.Module):
    """Normalises its inputs where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        x *= 2
        return self.body(x)


@pytest.mark.parametrize("way", ["accumulate", "dp", "ddp"])
def test_a_forward_may_write_to_its_inputs(way: str, tmp_path: Path, capsys: Any) -> None:
    """Found by trial: it was said to remember something."""
    job = dataclasses.replace(ZOO["mlp"], model=InPlace, metrics={"accuracy": right}).replace(
        precision="fp64"
    )
    run = train(job, **WAYS[way], folder=tmp_path)
    assert "note: the model" not in capsys.readouterr().out
    single = train(job, **WAYS["single"], folder=tmp_path, quiet=True)
    assert differences(job, run, single).worst < 1e-10
