"""Parameters on the memory of others, as ``nn.Parameter(self.encoder.weight.t())``: each is an
object of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.errors import StrategyError
from lockstep.launch import devices
from lockstep.launch.world import World
from lockstep.model.build import build_model
from zoo import drawn, sgd, slow

SAMPLES = 21  # in batches of 8: 8, 8, 5


class Autoencoder(nn.Module):
    """Its decoder has the weights of its encoder, as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return Autoencoder()


def job(**settings: Any) -> Job:
    data = TensorDataset(drawn(SAMPLES, 6), drawn(SAMPLES, 6))
    usual: dict[str, Any] = {
        "model": seeded,
        "loss": nn.MSELoss(),
        "optimizer": sgd,
        "train_data": data,
    }
    usual |= {
        "batch_size": 8,
        "epochs": 2,
        "shuffle": False,
        "precision": "fp64",
        "eval_data": data,
    }
    return Job(**{**usual, **settings})


def plain_loop() -> tuple[nn.Module, float]:
    """A loop by hand in float64: the model, and its loss."""
    model = seeded()
    for p in model.parameters():
        p.data = p.data.double()
    model.decoder.weight.data = model.encoder.weight.data.t()
    inputs, targets = drawn(SAMPLES, 6).double(), drawn(SAMPLES, 6).double()
    loss, optimizer = nn.MSELoss(), sgd(model.named_parameters())
    for _ in range(2):
        for mine, wanted in zip(inputs.split(8), targets.split(8), strict=True):
            optimizer.zero_grad()
            loss(model(mine), wanted).backward()
            optimizer.step()
    with torch.no_grad():
        return model, float(loss(model(inputs), targets))


@pytest.mark.parametrize("way", ["single", "dp", "pp", slow("ddp")])
def test_parameters_in_common_memory_stay_so_in_another_format(way: str, tmp_path: Path) -> None:
    """With precision="fp64" each got memory of its own: 0.9172 for 0.8890."""
    where = "1xcpu" if way == "single" else "2xcpu"
    run = lockstep.train(job(), strategy=way, devices=where, folder=tmp_path, quiet=True)
    expected, loss = plain_loop()
    assert run.metrics["loss"] == pytest.approx(loss, abs=1e-12)
    weights = run.model().state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-12, rtol=0)
    assert torch.equal(weights["encoder.weight"].t(), weights["decoder.weight"])
    half = lockstep.train(job(), strategy=way, devices=where, folder=tmp_path, quiet=True, steps=4)
    resumed = lockstep.train(job(), resume=half.folder, quiet=True)
    assert resumed.metrics["loss"] == run.metrics["loss"]


def test_rows_and_columns_of_one_tensor_and_buffers_keep_their_memory() -> None:
    """Views of other shapes, places and kinds, converted and laid out again."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.arange(24.0).view(4, 6).clone())
            self.columns = nn.Parameter(self.whole.detach()[:, 2:4])
            self.register_buffer("row", self.whole.detach()[3])
            self.images = nn.Parameter(torch.arange(16.0).view(1, 4, 2, 2).clone())
            self.first = nn.Parameter(self.images.detach()[:, :2])
            self.alone = nn.Parameter(torch.ones(3))

    model = build_model(job(model=Views, channels_last=True), World(devices=devices.parse("1xcpu")))
    with torch.no_grad():
        model.whole.add_(100)
        model.images.mul_(2)
    assert model.whole.dtype == model.row.dtype == torch.float64
    assert torch.equal(model.columns, model.whole[:, 2:4]) and torch.equal(
        model.row, model.whole[3]
    )
    assert torch.equal(model.first, model.images[:, :2]) and model.images[0, 3, 1, 1] == 30
    assert torch.equal(model.alone, torch.ones(3, dtype=torch.float64))


def test_shards_of_a_parameter_on_anothers_memory_are_refused_by_verify_too() -> None:
    """It converted the model first, and found the trainings of another model equal."""
    found = lockstep.verify(job(precision=None), strategy="fsdp", devices="2xcpu")
    assert not found
    assert 'fsdp: "decoder.weight" and "encoder.weight" have memory in common' in " ".join(
        str(found).split()
    )


@pytest.mark.slow
def test_hogwild_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=r"hogwild: .* have memory in common without being one parameter"
    ):
        lockstep.train(
            job(eval_data=None), strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True
        )
