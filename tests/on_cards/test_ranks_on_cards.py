"""Ranks with a card, or several, each: what they have of one another."""

from __future__ import annotations

import torch
from torch import nn

import lockstep
from lockstep.launch.world import World


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def masks_of_two_stages(world: World) -> list[str]:
    torch.manual_seed(0)
    drawn: list[torch.Tensor] = []

    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.training and torch.is_grad_enabled():
                drawn.append(torch.rand(3, device=x.device))
            return x

    model = nn.Sequential(Noisy(6, 6), Noisy(6, 4))
    way = lockstep.strategies.named("ddp=2xmp=2", device_map={"0": 0, "1": 1})
    step = lockstep.parallelize(model, nn.CrossEntropyLoss(), sgd, strategy=way)
    step.last_look = 0
    for _ in range(3):
        step(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
    return [str(values.tolist()) for values in drawn]


def test_replicas_of_stages_draw_numbers_of_their_own_on_each_card() -> None:
    one, other = lockstep.launch(masks_of_two_stages, "card:0,1,2,3", devices_per_rank=2)
    assert one and not set(one) & set(other)
