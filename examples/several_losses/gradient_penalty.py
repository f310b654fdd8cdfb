"""A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017) that learns to put points on a
ring.

lockstep train examples/several_losses/gradient_penalty.py --strategy dp --devices 2

The critic makes several updates a step. Its penalty is a gradient of its own outputs, of each
sample by itself, so that it is a sum over samples; noise and places in between come with the
samples.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

PENALTY = 10.0
TURNS = 3
"""Updates of the critic for one of the generator."""


class Ring(Dataset[Any]):
    """Points (2,) on a circle; with them noise (TURNS, 4), and places between the real and the
    drawn (TURNS, 1).
    """

    def __init__(self, count: int) -> None:
        angles = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> Any:
        return self.points[i], (torch.randn(TURNS, 4), torch.rand(TURNS, 1))


def networks(width: int) -> dict[str, nn.Module]:
    """Both, by the names of their optimizers."""
    return {
        "generator": nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)),
        "critic": nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)),
    }


def step(models: nn.ModuleDict, batch: Any, update: Any) -> None:
    """The critic in several turns, then the generator."""
    real, (noise, places) = batch
    generator, critic = models["generator"], models["critic"]
    for turn in range(TURNS):
        drawn = generator(noise[:, turn]).detach()
        between = (real + places[:, turn] * (drawn - real)).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().sum()
        update("critic", critic(drawn).sum() - critic(real).sum() + PENALTY * penalty, len(real))
    update("generator", -critic(generator(noise[:, 0])).sum(), len(real))


def adam(params: Any) -> torch.optim.Optimizer:
    """Of both."""
    return torch.optim.Adam(params, lr=1e-3, betas=(0.0, 0.9))


def job(epochs: int = 20, width: int = 64, samples: int = 2000) -> lockstep.Job:
    """The job; its parameters are given as `--set width=32`."""
    return lockstep.Job(
        model=lambda: networks(width),
        optimizer={"generator": adam, "critic": adam},
        step=step,
        train_data=lambda: Ring(samples),
        batch_size=100,
        epochs=epochs,
    )
