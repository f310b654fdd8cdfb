"""What a step does on accelerators alone, with those branches taken on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from zoo import drawn, labels, mlp


def trained(strategy: str, devices: str, *, as_on_accelerator: bool) -> torch.Tensor:
    """Weights after some updates in float64, with a loss that counts its items in an integer tensor."""
    torch.manual_seed(0)
    model = mlp().double()
    step = lockstep.parallelize(
        model,
        nn.CrossEntropyLoss(ignore_index=2),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        strategy=strategy,
        devices=devices,
        precision="fp64",
    )
    if as_on_accelerator:
        step._on_accelerator = True
    for batch in lockstep.batches(TensorDataset(drawn(60, 6), labels(60, 3)), batch_size=7):
        step(batch)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("strategy", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("pp", "2xcpu")])
def test_gradients_of_float64_are_weighted_in_float64(strategy: str, devices: str) -> None:
    """Batch size / count was a tensor of float32 where the count is an integer tensor that the host doesn't read."""
    here = trained(strategy, devices, as_on_accelerator=False)
    there = trained(strategy, devices, as_on_accelerator=True)
    assert (here - there).abs().max() < 1e-14
