"""Actor and critic (as in DDPG, Lillicrap et al. 2015) from a log of transitions, without
exploring.

lockstep train examples/several_losses/actor_critic.py --strategy dp --devices 2

A point moves on a line and is pushed by actions; the reward is greatest where it rests at 0. The
critic learns what a push is worth, the actor the push that the critic values most.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

DISCOUNT = 0.9


def transitions(count: int) -> TensorDataset:
    """States (count, 2), place and speed; and actions, rewards and next states: (count, 1 + 1 +
    2).
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, 2, generator=generator)
    actions = torch.empty(count, 1).uniform_(-1, 1, generator=generator)
    speeds = 0.9 * states[:, 1:] + 0.3 * actions
    following = torch.cat([states[:, :1] + 0.3 * speeds, speeds], dim=1)
    rewards = -following.square().sum(dim=1, keepdim=True) - 0.05 * actions.square()
    return TensorDataset(states, torch.cat([actions, rewards, following], dim=1))


def networks(width: int) -> dict[str, nn.Module]:
    """Both, by the names of their optimizers."""
    return {
        "actor": nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1), nn.Tanh()),
        "critic": nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)),
    }


def step(models: nn.ModuleDict, batch: Any, update: Any) -> None:
    """The critic learns from rewards, then the actor from the critic."""
    states, log = batch
    actions, rewards, following = log.split([1, 1, 2], dim=1)
    with torch.no_grad():
        then = models["critic"](torch.cat([following, models["actor"](following)], dim=1))
    worth = models["critic"](torch.cat([states, actions], dim=1))
    update("critic", (worth - rewards - DISCOUNT * then).square().sum(), len(states))
    chosen = torch.cat([states, models["actor"](states)], dim=1)
    update("actor", -models["critic"](chosen).sum(), len(states))


def job(epochs: int = 10, width: int = 64, samples: int = 4000) -> lockstep.Job:
    """The job; its parameters are given as `--set width=32`."""
    return lockstep.Job(
        model=lambda: networks(width),
        optimizer={
            "actor": lambda params: torch.optim.Adam(params, lr=3e-4),
            "critic": lambda params: torch.optim.Adam(params, lr=1e-3),
        },
        step=step,
        train_data=lambda: transitions(samples),
        batch_size=100,
        epochs=epochs,
        clip_norm=1.0,
    )
