"""Models that do in forward what a share of a batch can't keep: planted for those who are to see
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Averaging(nn.Linear):
    """Its buffer follows what a replica sees, and acts in training."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(x.mean(dim=0).detach(), alpha=0.1)
        return super().forward(x - self.seen)


class Noisy(nn.Linear):
    """Draws in forward, in no layer that is known for it."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * torch.randn_like(x))


class SelfWriting(nn.Linear):
    """Writes its bias, from some call on.

    Args:
        after: so many calls.
    """

    def __init__(self, after: int = 0) -> None:
        super().__init__(6, 3)
        self.after = after
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            with torch.no_grad():
                self.bias.data.copy_(x.mean(dim=0)[:3])
        return super().forward(x)


class NoisyGradient(torch.autograd.Function):
    """Draws in backward, where no function mode of the thread sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + 0.01 * torch.randn_like(grad)


class Clamping(torch.autograd.Function):
    """Clamps gradients, so that backward isn't linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Jittering(torch.optim.SGD):
    """Adds noise to the weights, of a generator that is seeded by the rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        own = torch.Generator().manual_seed(rank)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=own, dtype=p.dtype), alpha=1e-3)
