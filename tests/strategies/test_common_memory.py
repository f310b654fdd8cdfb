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

from harness import trained  # isort: skip
from zoo import drawn, sgd, slow

SAMPLES = 21  # in batches of 8: 8, 8, 5


class Autoencoder(nn.Module):
    """Its decoder has the weights of its encoder, as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4, dtype=torch.float64)
        self.decoder = nn.Linear(4, 6, dtype=torch.float64)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return Autoencoder()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(SAMPLES, 6).double(), drawn(SAMPLES, 6).double()


def job(**settings: Any) -> Job:
    """Its model is made in float64, so that nothing is converted."""
    data = TensorDataset(*samples())
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
        "eval_data": data,
    }
    return Job(**{**usual, **settings})


def plain_loop() -> tuple[nn.Module, float]:
    """A loop by hand: the model, and its loss."""
    model = seeded()
    inputs, targets = samples()
    loss, optimizer = nn.MSELoss(), sgd(model.named_parameters())
    for _ in range(2):
        for mine, wanted in zip(inputs.split(8), targets.split(8), strict=True):
            optimizer.zero_grad()
            loss(model(mine), wanted).backward()
            optimizer.step()
    with torch.no_grad():
        return model, float(loss(model(inputs), targets))


@pytest.mark.parametrize("way", ["single", "dp", "pp", slow("ddp")])
def test_parameters_in_common_memory_are_not_converted(way: str, tmp_path: Path) -> None:
    """With precision="fp64" each got memory of its own: 0.9172 for 0.8890."""
    with pytest.raises(StrategyError, match=r"have memory in common .* moved or converted"):
        trained(job(precision="fp32"), tmp_path, way)


@pytest.mark.parametrize("way", ["single", "dp", "pp", slow("ddp")])
def test_parameters_in_common_memory_stay_so(way: str, tmp_path: Path) -> None:
    run = trained(job(), tmp_path, way)
    expected, loss = plain_loop()
    assert run.metrics["loss"] == pytest.approx(loss, abs=1e-12)
    weights = run.model().state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=1e-12, rtol=0)
    assert torch.equal(weights["encoder.weight"].t(), weights["decoder.weight"])
    half = trained(job(), tmp_path, way, steps=4)
    resumed = lockstep.train(job(), resume=half.folder, quiet=True)
    assert resumed.metrics["loss"] == run.metrics["loss"]


def test_shards_of_a_parameter_on_anothers_memory_are_refused_by_verify_too() -> None:
    """It converted the model first, and found the trainings of another model equal."""
    found = lockstep.verify(job(), strategy="fsdp", devices="2xcpu")
    assert not found
    assert 'fsdp: "decoder.weight" and "encoder.weight" have memory in common' in " ".join(
        str(found).split()
    )


@pytest.mark.slow
def test_hogwild_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=r"hogwild: .* have memory in common without being one parameter"
    ):
        trained(job(eval_data=None), tmp_path, "hogwild")
