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


@pytest.mark.parametrize("way", ["single", "pp"])
def test_parameters_in_common_memory_are_not_converted(way: str, tmp_path: Path) -> None:
    """With precision="fp64" each got memory of its own: 0.9172 for 0.8890."""
    where = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(StrategyError, match=r"have memory in common .* moved or converted"):
        lockstep.train(job(), strategy=way, devices=where, folder=tmp_path, quiet=True)


@pytest.mark.parametrize("way", ["dp", "pp", slow("ddp")])
def test_parameters_in_common_memory_stay_so(way: str, tmp_path: Path) -> None:
    ends = []
    for strategy, where in (("single", "1xcpu"), (way, "2xcpu")):
        run = lockstep.train(
            job(precision=None), strategy=strategy, devices=where, folder=tmp_path, quiet=True
        )
        ends.append(run.model().state_dict())
        assert torch.equal(ends[-1]["encoder.weight"].t(), ends[-1]["decoder.weight"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


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
            job(eval_data=None, precision=None),
            strategy="hogwild",
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
        )
