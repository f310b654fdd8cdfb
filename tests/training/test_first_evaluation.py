"""The evaluation of a first batch before training leaves nothing behind in the model, the loss or their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.verify import same_bits
from zoo import ZOO


class Slotted:
    __slots__ = ("calls",)


class Fading(nn.Module):
    """Divides by the number of its calls, which it keeps where nothing was before: its layer, say."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.linear, self.slotted = where, nn.Linear(6, 3), Slotted()
        if hasattr(Fading, "calls"):
            del Fading.calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of: Any = {
            "model": self,
            "layer": self.linear,
            "parameter": self.linear.weight,
            "class": Fading,
            "slot": self.slotted,
        }[self.where]
        of.calls = getattr(of, "calls", 0) + 1
        return self.linear(x) / of.calls


class FadingLoss(nn.Module):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls: int = getattr(self, "calls", 0) + 1
        return nn.functional.cross_entropy(outputs, targets) / self.calls


@pytest.mark.parametrize("where", ["model", "layer", "parameter", "class", "slot", "loss"])
def test_what_is_new_in_it_is_gone_afterwards(where: str, tmp_path: Path) -> None:
    """Found by trial: weights were 2 to 16 % off those of a loop written by hand, with eval_data only."""
    job = ZOO["mlp"].replace(precision="fp64", metrics={}, epochs=1)
    ends = []
    for eval_data in (None, job.eval_data):
        one = job.replace(loss=FadingLoss()) if where == "loss" else job.replace(model=lambda: Fading(where))
        one = one.replace(eval_data=eval_data)
        ends.append(train(one, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True).model())
    assert same_bits(*ends)
