"""A GAN (Goodfellow et al. 2014) that draws handwritten digits: two networks, two losses, two
optimizers in one job.

lockstep train examples/several_losses/gan.py --strategy ddp --devices 2

The noise that a picture is drawn from comes with a sample, and what a dataset draws for a sample is
the same on any number of devices; so both networks learn the same too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep

NOISE = 16
"""Random numbers that a picture is drawn from."""


class Digits(Dataset[tuple[Any, None]]):
    """The digits that come with scikit-learn, each with noise that is new in every epoch: inputs
    (64,) and (16,).
    """

    def __init__(self, count: int) -> None:
        from sklearn.datasets import load_digits

        self.images = torch.tensor(load_digits().data[:count], dtype=torch.float32) / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, torch.Tensor]:
        return self.images[i], torch.randn(NOISE)


def networks(width: int) -> dict[str, nn.Module]:
    """Both, by the names of their optimizers."""
    return {
        "generator": nn.Sequential(
            nn.Linear(NOISE, width), nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Tanh()
        ),
        "discriminator": nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        ),
    }


def step(models: nn.ModuleDict, batch: Any, update: Any) -> None:
    """One step of each: the generator is judged by the discriminator as it is after its own
    step.
    """
    real, noise = batch
    drawn = models["generator"](noise)
    of_real, of_drawn = models["discriminator"](real), models["discriminator"](drawn.detach())
    update("discriminator", F.softplus(-of_real).sum() + F.softplus(of_drawn).sum(), 2 * len(real))
    update("generator", F.softplus(-models["discriminator"](drawn)).sum(), len(real))


def adam(params: Any) -> torch.optim.Optimizer:
    """Of both."""
    return torch.optim.Adam(params, lr=5e-4, betas=(0.5, 0.999))


def job(epochs: int = 20, width: int = 128, samples: int = 1797) -> lockstep.Job:
    """The job; its parameters are given as `--set width=64`."""
    return lockstep.Job(
        model=lambda: networks(width),
        optimizer={"generator": adam, "discriminator": adam},
        step=step,
        train_data=lambda: Digits(samples),
        batch_size=100,
        epochs=epochs,
    )
