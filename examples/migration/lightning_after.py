"""Handwritten digits by Lockstep: lockstep train lightning_after.py --strategy ddp --devices 2."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def data() -> tuple[Subset, Subset]:
    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return Subset(whole, range(1536)), Subset(whole, range(1536, 1792))


def sampler(epoch: int) -> torch.Tensor:
    """The order of DistributedSampler, so that the same numbers are printed; leave it out."""
    return torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))


def job() -> lockstep.Job:
    train_data, eval_data = data()
    return lockstep.Job(
        model=Digits, loss=F.cross_entropy, train_data=train_data, eval_data=eval_data, batch_size=64, order=sampler,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), epochs=5, clip_norm=1.0,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        metrics={"accuracy": lambda outputs, targets: ((outputs.argmax(1) == targets).sum(), len(targets))},
    )
