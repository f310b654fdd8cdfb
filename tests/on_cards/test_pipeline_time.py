"""Pipelines over cards in virtual time: each card computes in its own order of the schedule, and
copies hold nobody.

An update takes what `simulate` says of its schedule, which is what ``auto`` chooses by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.schedule import SCHEDULES, Action
from lockstep.strategies.pp import PP

card = torch.ops.simulated_card
COSTS = {
    "aten::addmm": 1.0,
    "aten::mm": 1.0,
}  # of a linear layer's forward, and twice in its backward
SHARE = 0.95
"""Of the schedule's ideal, what is reached at least."""


class Chain(nn.Module):
    """One layer for each stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Skips(Chain):
    """As a U-Net has them, between layers, with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, layer in enumerate(self.layers):
            x = nn.functional.dropout(layer(x), 0.1)
            if i < len(self.layers) // 2:
                kept.append(x)
            else:
                x = x + kept.pop()
        return x


class Tied(Chain):
    """The first weight is the last one too."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.layers[-1].weight = self.layers[0].weight


class Masked(nn.Module):
    """A mask that is made first is given to each layer."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MaskedLayer(4, 4) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > -1
        for layer in self.layers:
            x = layer(x, mask)
        return x


class MaskedLayer(nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask


@contextlib.contextmanager
def costs(copy: float) -> Iterator[None]:
    """Meanwhile operators take their times, and a copy that one, beside a layer's forward of 1."""
    for name, cost in {**COSTS, "copy": copy}.items():
        card.set_cost(name, cost)
    try:
        yield
    finally:
        for name in (*COSTS, "copy"):
            card.set_cost(name, 0.0)


def taken(model: type[nn.Module], schedule: str, cards: int, microbatches: int) -> float:
    """Virtual seconds of the third update of a model with one layer for each stage."""
    stages = cards * (2 if schedule == "interleaved" else 1)
    data = TensorDataset(
        torch.randn(3 * microbatches, 4), torch.zeros(3 * microbatches, dtype=torch.long)
    )
    job = Job(
        model=lambda: model(stages),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
        batch_size=microbatches,
    )
    way = PP({f"layers.{stage}": stage for stage in range(stages)}, microbatches, schedule)
    world = World(devices=tuple(Device("card", i) for i in range(cards)))
    step = way.prepare(job, world)
    for batch in way.training_loader(job, world, data).epoch(0):
        card.reset_clocks()
        step.update(batch)
    return max(card.clock_of(i) for i in range(cards))


def ideal(schedule: str, cards: int, microbatches: int, transfer: float = 0.0) -> float:
    """What the schedule takes; the first layer's input needs no gradient."""
    order = SCHEDULES[schedule](cards, microbatches)

    def seconds(action: Action) -> float:
        return 2.0 if action.kind == "B" and action.stage else 1.0

    return simulate(order, seconds, transfer).makespan


SWEEP = [
    (name, cards, count)
    for name in SCHEDULES
    for cards in (2, 3, 4, 6, 8)
    for count in (4, 8, 16, 32)
]


@pytest.mark.parametrize(
    ("schedule", "cards", "microbatches"),
    [
        pytest.param(*c, marks=() if c[1] in (2, 4) and c[2] == 8 else pytest.mark.slow)
        for c in SWEEP
    ],
)
def test_an_update_takes_what_its_schedule_does(
    schedule: str, cards: int, microbatches: int
) -> None:
    with costs(copy=0.01):
        found = taken(Chain, schedule, cards, microbatches)
    assert ideal(schedule, cards, microbatches) / found >= SHARE


@pytest.mark.parametrize("model", [Skips, Tied, Masked])
def test_so_it_does_where_more_than_one_tensor_goes_from_card_to_card(
    model: type[nn.Module],
) -> None:
    with costs(copy=0.01):
        found = taken(model, "1f1b", 4, 8)
    assert ideal("1f1b", 4, 8) / found >= SHARE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cards_compute_while_copies_are_on_their_way(schedule: str) -> None:
    with costs(copy=0.25):
        found = taken(Chain, schedule, 4, 8)
    assert ideal(schedule, 4, 8, transfer=0.25) / found >= SHARE
