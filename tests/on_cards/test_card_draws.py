"""Random numbers of micro-batches that overlap on two cards: those that they draw one after the
other.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.pipelining.runner import Runner
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single
from lockstep.strategies.steps.step import Step

from zoo import _job, drawn, labels  # isort: skip

FIRST, SECOND = Device("card", 0), Device("card", 1)
HALVES = {"first": 0, "": 1}


class Drawing(nn.Module):
    """Draws on the first card, on the CPU and from Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "on a card":
            x = nn.functional.dropout(x, 0.5)
        elif self.how == "in a checkpoint":
            x = checkpoint(nn.functional.dropout, x, 0.5, use_reentrant=False)
        elif self.how == "on the CPU":
            x = x * torch.rand(6, dtype=torch.float64).to(x.device)
        else:
            x = x * random.random()
        return self.out(torch.tanh(self.second(x)))


def gradients(step: Step, updates: int) -> list[dict[str, torch.Tensor]]:
    """After each update."""
    found = []
    for number in range(updates):
        step.seed(5)
        step(drawn(8, 6, seed=number).double(), labels(8, 3))
        found.append({name: p.grad.cpu().clone() for name, p in step.model.named_parameters()})
    return found


@pytest.mark.parametrize("how", ["on a card", "in a checkpoint", "on the CPU", "from Python"])
def test_micro_batches_that_overlap_draw_what_one_card_draws(how: str, monkeypatch) -> None:
    overlapped: list[bool] = []
    run = Runner.run

    def noting(self: Runner, *args: Any, **named: Any) -> Any:
        found = run(self, *args, **named)
        overlapped.append(self.overlaps)
        return found

    monkeypatch.setattr(Runner, "run", noting)
    job = _job(lambda: Drawing(how), precision="fp64")
    one = gradients(Single().prepare(job.replace(accumulate=3), World(devices=(FIRST,))), 4)
    for schedule in ("gpipe", "1f1b"):
        overlapped.clear()
        many = gradients(PP(HALVES, 3, schedule).prepare(job, World(devices=(FIRST, SECOND))), 4)
        assert overlapped == [False, True, True, True]
        for mine, expected in zip(many, one, strict=True):
            for name, gradient in expected.items():
                torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-12)
