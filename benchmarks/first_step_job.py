"""The same first step as a job: the optimizer writes the time when its first step is done."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def _note_the_time(optimizer, args, kwargs) -> None:
    if int(os.environ.get("RANK", "0")) == 0 and not os.path.exists(os.environ["FIRST_STEP"]):
        with open(os.environ["FIRST_STEP"], "w") as file:
            file.write(repr(time.time()))


def _sgd(params) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    optimizer.register_step_post_hook(_note_the_time)
    return optimizer


def job() -> lockstep.Job:
    return lockstep.Job(
        model=lambda: nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=_sgd,
        train_data=TensorDataset(torch.randn(64, 64), torch.randint(10, (64,))),
        batch_size=64,
        steps=1,
    )
