"""What a step does on accelerators alone, with those branches taken on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from cards import Cards, CardTensor, plain
from lockstep.model.optimizer import clip_gradients
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


def test_sparse_gradients_are_clipped_together_with_those_of_another_device() -> None:
    rows, dense = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
    rows.grad = torch.sparse_coo_tensor([[1, 1]], [[3.0, 0.0], [0.0, 0.0]], (4, 2), check_invariants=True)
    with Cards():
        there = nn.Parameter(CardTensor(dense.detach(), torch.device("meta:0")))
        there.grad = CardTensor(torch.tensor([0.0, 4.0, 0.0]), torch.device("meta:0"))
        clip_gradients([there, rows], 1.0)
    torch.testing.assert_close(plain(there.grad), torch.tensor([0.0, 0.8, 0.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.grad.to_dense()[1], torch.tensor([0.6, 0.0]), rtol=1e-5, atol=0)
