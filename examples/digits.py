"""Handwritten digits: 1,797 real images of 8 x 8 pixels that come with scikit-learn, four fifths to
train on.

lockstep train examples/digits.py --strategy ddp --devices 2
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Net(nn.Module):
    """Two convolutions and two linear layers: (batch, 1, 8, 8) to (batch, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * width * 16, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        return self.head(self.features(images))


def digits(held_out: bool) -> TensorDataset:
    """Every fifth image is for evaluation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(images[chosen], labels[chosen])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, of how many."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def job(lr: float = 0.05, width: int = 32, epochs: int = 10) -> lockstep.Job:
    """The job; its parameters are given as `--set lr=0.1`, and `--epochs 5` comes in by its
    name, for the annealing.
    """
    return lockstep.Job(
        model=lambda: Net(width),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9),
        train_data=lambda: digits(held_out=False),
        eval_data=lambda: digits(held_out=True),
        batch_size=64,
        epochs=epochs,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=epochs
        ),
        metrics={"accuracy": accuracy},
    )
