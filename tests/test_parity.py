"""The heart of the suite: every strategy ends where one device would have, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lockstep import Job, train
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy
from lockstep.train import Run
from lockstep.verify import differences, parity, same_bits

from zoo import ZOO, drawn, labels, plain_sgd  # isort: skip

BOUND = 1e-10
WAYS: dict[str, Strategy] = {"dp": DP(), "ddp flat": DDP(reduce="flat"), "ddp overlapped": DDP(reduce="overlapped")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ZOO)
def test_a_strategy_ends_where_one_device_does(kind: str, way: str, devices: int, reference, tmp_path_factory) -> None:
    job = ZOO[kind].having(precision="fp64")
    if kind not in reference:
        reference[kind] = train(
            job, strategy="single", devices="1xcpu", folder=tmp_path_factory.mktemp("single"), quiet=True
        )
    run = train(job, strategy=WAYS[way], devices=f"{devices}xcpu", folder=tmp_path_factory.mktemp("run"), quiet=True)
    found = differences(job, run, reference[kind])
    assert found.worst < BOUND, str(found)
    assert any(found.moved.values())
    assert found.history.get("accuracy", 0.0) == 0.0, "metrics count whole samples, so they are equal to the last digit"
    assert max(found.history.values()) < BOUND


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_weight_of_unequal_shares_would_be_seen(way: str, tmp_path) -> None:
    """The bound means something: a mean over ranks instead of over samples differs by far more."""
    job = ZOO["ignored tokens and tied weights"].having(precision="fp64")
    mean_of_means = dataclasses.replace(job, loss=_mean_of_halves)
    a = train(mean_of_means, strategy="single", devices="1xcpu", folder=tmp_path / "a", quiet=True)
    b = train(job, strategy=WAYS[way], devices="2xcpu", folder=tmp_path / "b", quiet=True)
    assert differences(job, b, a).worst > 1e-4


def _mean_of_halves(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    cut = (len(outputs) + 1) // 2
    halves = [
        nn.functional.cross_entropy(o, t) for o, t in ((outputs[:cut], targets[:cut]), (outputs[cut:], targets[cut:]))
    ]
    return sum(halves) / len(halves)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(nn.functional.dropout(x, 0.1, self.training))


@pytest.mark.parametrize("way", [Single(), DP(), DDP()], ids=lambda way: way.name)
def test_the_same_seed_twice_gives_the_same_bits_with_dropout(way: Strategy, tmp_path) -> None:
    job = Job(
        model=Dropping,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=torch.utils.data.TensorDataset(drawn(50, 6), labels(50, 3)),
        batch_size=8,
        epochs=3,
    )
    devices = "1xcpu" if way.name == "single" else "2xcpu"
    runs = [train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True) for _ in range(2)]
    other = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True, seed=1)
    assert same_bits(runs[0].model(), runs[1].model())
    assert not same_bits(runs[0].model(), other.model())


@pytest.mark.parametrize(("before", "after"), [("single", "ddp"), ("ddp", "dp"), ("dp", "single")])
@pytest.mark.parametrize(
    "kind", ["adamw with groups by name", "a schedule by step", "convolutions with sync_batchnorm"]
)
def test_a_run_goes_on_under_another_strategy(kind: str, before: str, after: str, tmp_path) -> None:
    job = ZOO[kind].having(precision="fp64", epochs=2)
    devices = {"single": "1xcpu", "dp": "3xcpu", "ddp": "2xcpu"}
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    half = train(job, strategy=before, devices=devices[before], folder=tmp_path, quiet=True, epochs=1)
    resumed = train(job, strategy=after, devices=devices[after], resume=half.folder, quiet=True)
    assert resumed.folder == half.folder
    assert [record["epoch"] for record in resumed.history] == [1, 2]
    assert differences(job, resumed, whole).worst < BOUND


def test_a_run_that_stopped_within_an_epoch_goes_on_from_there(tmp_path) -> None:
    job = ZOO["momentum"].having(precision="fp64", epochs=2)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    part = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True, steps=2)
    resumed = train(job, strategy="dp", devices="2xcpu", resume=part.folder, quiet=True)
    assert resumed.summary["steps"] == whole.summary["steps"]
    assert differences(job, resumed, whole).worst < BOUND


def test_the_harness_says_how_far_two_strategies_are_apart() -> None:
    found = parity(ZOO["mlp"], "dp", "2xcpu")
    assert found.worst < BOUND
    assert "largest difference" in str(found)
