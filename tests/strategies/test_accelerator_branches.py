"""What a step does on accelerators alone, with those branches taken on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.pipelining.planner.partition import capacities
from lockstep.profiling.clock import Clock
from lockstep.strategies.single import Single
from zoo import drawn, labels, mlp, plain_sgd


def trained(strategy: str, devices: str, *, as_on_accelerator: bool) -> torch.Tensor:
    """Weights after some updates in float64, with a loss that counts its items in an integer
    tensor.
    """
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


@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("pp", "2xcpu")]
)
def test_gradients_of_float64_are_weighted_in_float64(strategy: str, devices: str) -> None:
    """Batch size / count was a tensor of float32 where the count is an integer tensor that the
    host doesn't read.
    """
    here = trained(strategy, devices, as_on_accelerator=False)
    there = trained(strategy, devices, as_on_accelerator=True)
    assert (here - there).abs().max() < 1e-14


# ---- memory and time of several devices ----------------------------------------------------------


CARDS = tuple(Device("cuda", index) for index in range(2))


def test_the_capacity_of_a_card_is_what_is_free_on_it(monkeypatch) -> None:
    """It was all of its memory, whoever else had taken some."""
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda card: (5000 + card.index, 80000)
    )
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda card: 300)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda card: 100)
    assert capacities(CARDS) == [5200.0, 5201.0]


def test_peaks_count_from_when_the_model_is_built(monkeypatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", order.append)
    monkeypatch.setattr(Single, "build", lambda self, job, world: order.append("built"))
    job = Job(
        model=lambda: nn.Linear(6, 3),
        loss=nn.CrossEntropyLoss(),
        batch_size=8,
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(16, 6), labels(16, 3)),
    )
    Single().prepare(job, World(devices=CARDS))
    assert order == ["built", torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_profile_waits_for_all_cards(monkeypatch) -> None:
    """It waited for the current one, so that a pipeline's later stages took no time."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    step = SimpleNamespace(world=World(devices=CARDS), timed="rank")
    Clock(step).wait()
    assert waited == [torch.device("cuda", 0), torch.device("cuda", 1)]
