"""The models and data that the benchmarks train: the same on every side of a ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from examples.models.mobilenetv2 import MobileNetV2
from lockstep.jobfile import JobFile

EXPERIMENT = Path(__file__).parent.parent / "examples" / "cifar10_mobilenetv2.py"


class Stack(nn.Module):
    """Transformer encoder layers, no dropout: (batch, 64, width) to (batch, width)."""

    def __init__(self, layers: int = 8, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def small_data(samples: int = 32_000) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def stack_job() -> lockstep.Job:
    """Batch 64 of 64 tokens; two batches an epoch."""
    data = TensorDataset(torch.randn(128, 64, 256), torch.randn(128, 256))
    return lockstep.Job(
        model=Stack, loss=nn.MSELoss(), optimizer=sgd, train_data=data, batch_size=64, epochs=3, shuffle=False
    )


def mobilenet_job() -> lockstep.Job:
    """Batch 32 of 112 x 112; four batches an epoch."""
    data = TensorDataset(torch.randn(128, 3, 112, 112), torch.randint(10, (128,)))
    return lockstep.Job(
        model=lambda: MobileNetV2(classes=10, dropout=0.0),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=32,
        epochs=3,
        channels_last=True,
    )


def small_job(epochs: int = 6) -> lockstep.Job:
    """The small step: 64 samples a batch, 500 batches an epoch."""
    return lockstep.Job(
        model=small_mlp,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=small_data(),
        batch_size=64,
        epochs=epochs,
    )


def experiment_job(samples: int = 2048) -> lockstep.Job:
    """examples/cifar10_mobilenetv2.py on noise: images of 32 x 32 enlarged to 112 x 112, batch 256."""
    return JobFile(str(EXPERIMENT), {"generated": "true", "samples": str(samples)}).load()
