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
from lockstep.errors import JobError

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


@pytest.mark.parametrize("way", ["single", "dp", "pp", slow("ddp"), slow("fsdp"), slow("hogwild")])
def test_parameters_in_common_memory_are_refused(way: str, tmp_path: Path) -> None:
    """Found by trial: with precision="fp64" each got memory of its own: 0.9172 for 0.8890."""
    says = '"decoder.weight" and "encoder.weight" have memory in common without being one parameter'
    with pytest.raises(JobError, match=says):
        trained(job(), tmp_path, way)
    assert not list(tmp_path.iterdir())


def test_verify_refuses_them_too() -> None:
    """Found by trial: it converted the model first, and found the trainings of another model
    equal.
    """
    with pytest.raises(JobError, match="have memory in common"):
        lockstep.verify(job(), strategy="fsdp", devices="2xcpu")
