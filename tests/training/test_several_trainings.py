"""Several trainings in one process: each begins as if it were the first, or is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Job, predict, train
from lockstep.errors import JobError

from harness import same_bits  # isort: skip
from zoo import ZOO, drawn, labels, plain_sgd


class OfParameter(nn.Module):
    """Has a parameter that it is given."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


@functools.cache
def kept_layer() -> nn.Module:
    return nn.Linear(6, 3)


GIVEN = ["the model", "a part", "a dict", "a parameter", "a tensor", "a kept one"]


@pytest.mark.parametrize("given", GIVEN)
def test_a_module_that_is_not_built_anew_is_refused_the_second_time(
    given: str, tmp_path: Path
) -> None:
    """Found by trial: the second of two trainings began with the weights of the first, without a
    line.
    """
    net = nn.Linear(6, 3)
    nets = {"net": net}
    weight = nn.Parameter(drawn(3, 6))
    tensor = drawn(3, 6)
    makes: dict[str, Any] = {
        "the model": lambda: net,
        "a part": lambda: nn.Sequential(net, nn.Tanh()),
        "a dict": lambda: nets["net"],
        "a parameter": lambda: OfParameter(weight),
        "a tensor": lambda: OfParameter(nn.Parameter(tensor)),
        "a kept one": kept_layer,
    }
    job = ZOO["mlp"].replace(model=makes[given], metrics={}, eval_data=None, epochs=1)
    how: dict[str, Any] = {
        "strategy": "single",
        "devices": "1xcpu",
        "folder": tmp_path,
        "quiet": True,
    }
    first = train(job, **how)
    ends = first.model()
    with pytest.raises(
        JobError,
        match=r'model: the function gave the same ".*weight" twice: build it in the function',
    ):
        train(job, **how)
    predict(first, drawn(4, 6), quiet=True)
    assert same_bits(ends, first.model())
    again = train(job.replace(epochs=2), resume=first.folder, quiet=True)
    assert not same_bits(ends, again.model()), "the model of a run is its own"


def test_a_frozen_module_may_be_the_same_in_each_training(tmp_path: Path) -> None:
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    job = ZOO["mlp"].replace(
        model=lambda: nn.Sequential(backbone, nn.Linear(8, 3)), metrics={}, epochs=1
    )
    for _ in range(2):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)


def test_a_model_of_a_run_may_be_trained_further_several_times(tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(metrics={}, eval_data=None, epochs=1)
    how: dict[str, Any] = {
        "strategy": "single",
        "devices": "1xcpu",
        "folder": tmp_path,
        "quiet": True,
    }
    run = train(job, **how)
    one, other = (train(job.replace(model=run.model), **how).model() for _ in range(2))
    assert same_bits(one, other)


@pytest.mark.parametrize("kind", ["frozen vectors", "statistics"])
def test_weights_that_are_loaded_are_not_written_to_tensors_of_before(
    kind: str, tmp_path: Path
) -> None:
    """Found by trial: a run's model, an evaluation and a prediction wrote its weights to them."""
    given = drawn(20, 8) if kind == "frozen vectors" else torch.zeros(8)

    def model() -> nn.Module:
        norm = nn.BatchNorm1d(8)
        if kind == "statistics":
            norm.running_mean = given
            return nn.Sequential(nn.Linear(2, 8), norm, nn.Linear(8, 3))
        return nn.Sequential(nn.EmbeddingBag.from_pretrained(given), norm, nn.Linear(8, 3))

    words = labels(32, 20).view(16, 2)
    data = torch.utils.data.TensorDataset(
        words if kind == "frozen vectors" else words.float(), labels(16, 3)
    )
    job = Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=data,
        batch_size=8,
        epochs=1,
    )
    run = train(
        job.replace(eval_data=data), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True
    )
    given += 1
    before = given.clone()
    run.model()
    lockstep.evaluate(run, devices=1)
    predict(run, data.tensors[0], devices=1, quiet=True)
    assert torch.equal(given, before)


def test_verify_refuses_a_model_that_is_not_built_anew() -> None:
    """Found by trial: it was said to draw unseeded numbers."""
    net = nn.Linear(6, 3)
    with pytest.raises(JobError, match=r'the function gave the same "weight" twice'):
        lockstep.verify(ZOO["mlp"].replace(model=lambda: net), strategy="dp", devices="2xcpu")
