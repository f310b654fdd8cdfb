"""Inputs that are objects with ``.to()``, as the batches of graph libraries are: moved and cast
by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import train
from zoo import ZOO, mlp


class Graphs:
    """Nodes with values and numbers; only values are cast."""

    def __init__(self, values: torch.Tensor, numbers: torch.Tensor) -> None:
        self.values, self.numbers = values, numbers

    def to(self, where: torch.device | torch.dtype) -> Graphs:
        if isinstance(where, torch.dtype):
            return Graphs(self.values.to(where), self.numbers)
        return Graphs(self.values.to(where), self.numbers.to(where))


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, graphs: Graphs) -> torch.Tensor:
        return self.layers(graphs.values[graphs.numbers])


def put_together(samples: list[Any]) -> Any:
    values, targets = (torch.stack(list(column)) for column in zip(*samples, strict=True))
    return Graphs(values, torch.arange(len(values))), targets


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("ddp", "2xcpu")]
)
def test_an_object_with_to_is_cast_to_the_format_of_the_model(
    strategy: str, devices: str, tmp_path: Path
) -> None:
    plain = ZOO["mlp"].replace(precision="fp64", epochs=1, loader_workers=0)
    whole = train(plain, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(
        plain.replace(model=OfGraphs, collate=put_together),
        strategy=strategy,
        devices=devices,
        folder=tmp_path,
        quiet=True,
    )
    assert run.history[0]["train_loss"] == pytest.approx(whole.history[0]["train_loss"], abs=1e-12)
    assert run.history[0]["eval_loss"] == pytest.approx(whole.history[0]["eval_loss"], abs=1e-12)
