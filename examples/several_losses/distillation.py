"""Distillation (Hinton et al. 2015): a small network learns digits from a frozen teacher, and from
the labels.

lockstep train examples/several_losses/distillation.py --strategy ddp --devices 2

The teacher has no optimizer and no parameter that requires a gradient. The model has a forward and
the job a loss, so it is evaluated as any other is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

WARM = 4.0
"""What the logits are divided by, so that the teacher says more of the wrong classes."""


def digits(held_out: bool) -> TensorDataset:
    """The 8 x 8 digits that come with scikit-learn; every fifth is for evaluation."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    labels = torch.tensor(load_digits().target)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(images[chosen], labels[chosen])


class Pair(nn.Module):
    """The student, whose outputs these are, beside its teacher: one that knows the mean picture
    of each digit.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        images, labels = digits(held_out=False).tensors
        means = torch.stack([images[labels == digit].mean(dim=0) for digit in range(10)])
        self.teacher = nn.Linear(64, 10)
        self.teacher.weight.data, self.teacher.bias.data = 8 * means, -4 * means.square().sum(dim=1)
        self.teacher.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 10), of images (batch, 64)."""
        logits: torch.Tensor = self.student(images)
        return logits


def step(models: Pair, batch: Any, update: Any) -> None:
    """One update of the student, by both losses."""
    images, labels = batch
    logits, taught = models.student(images), models.teacher(images)
    soft = F.kl_div(
        (logits / WARM).log_softmax(1),
        (taught / WARM).log_softmax(1),
        reduction="sum",
        log_target=True,
    )
    update(
        "student", F.cross_entropy(logits, labels, reduction="sum") + WARM**2 * soft, len(images)
    )


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, of how many."""
    return (logits.argmax(dim=1) == labels).sum(), len(labels)


def job(epochs: int = 10, width: int = 16) -> lockstep.Job:
    """The job; its parameters are given as `--set width=32`."""
    return lockstep.Job(
        model=lambda: Pair(width),
        optimizer={"student": lambda params: torch.optim.AdamW(params, lr=3e-3)},
        step=step,
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        train_data=lambda: digits(held_out=False),
        eval_data=lambda: digits(held_out=True),
        batch_size=64,
        epochs=epochs,
    )
