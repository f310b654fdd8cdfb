"""The job of the run that is kept beside it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def job(width: int = 8) -> lockstep.Job:
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train_data=data(53, seed=1),
        eval_data=data(20, seed=2),
        batch_size=8,
        epochs=2,
        clip_norm=1.0,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        metrics={"accuracy": right},
    )
