"""Pipelines over cards in virtual time: each card computes in its own order of the schedule, and copies hold nobody.

An update takes what `simulate` says of its schedule, which is what ``auto`` chooses by.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.pipelining.planner.simulate import simulate
from lockstep.pipelining.schedule import SCHEDULES
from lockstep.strategies.pp import PP

card = torch.ops.simulated_card
COSTS = {"aten::addmm": 1.0, "aten::mm": 1.0}  # of a linear layer's forward, and twice in its backward
SHARE = 0.95
"""Of the schedule's ideal, what is reached at least."""


@pytest.fixture
def copy_time() -> Iterator[float]:
    """What a copy takes, beside a layer's forward of 1."""
    seconds = 0.01
    for name, cost in {**COSTS, "copy": seconds}.items():
        card.set_cost(name, cost)
    yield seconds
    for name in (*COSTS, "copy"):
        card.set_cost(name, 0.0)


def taken(schedule: str, cards: int, microbatches: int) -> float:
    """Virtual seconds of the third update of a model with one layer for each stage."""
    stages = cards * (2 if schedule == "interleaved" else 1)
    data = TensorDataset(torch.randn(3 * microbatches, 4), torch.zeros(3 * microbatches, dtype=torch.long))
    job = Job(
        model=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages))),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
        batch_size=microbatches,
    )
    way = PP({str(stage): stage for stage in range(stages)}, microbatches, schedule)
    world = World(devices=tuple(Device("card", i) for i in range(cards)))
    step = way.prepare(job, world)
    for batch in way.training_loader(job, world, data).epoch(0):
        card.reset_clocks()
        step.update(batch)
    return max(card.clock_of(i) for i in range(cards))


def ideal(schedule: str, cards: int, microbatches: int, transfer: float = 0.0) -> float:
    """What the schedule takes; the first layer's input needs no gradient."""
    order = SCHEDULES[schedule](cards, microbatches)
    stages = 1 + max(action.stage for action in order[-1])
    return simulate(order, 1.0, [1.0, *[2.0] * (stages - 1)], transfer).makespan


SWEEP = [(schedule, cards, count) for schedule in SCHEDULES for cards in (2, 3, 4, 6, 8) for count in (4, 8, 16, 32)]


@pytest.mark.parametrize(
    ("schedule", "cards", "microbatches"),
    [pytest.param(*c, marks=() if c[1] in (2, 4) and c[2] == 8 else pytest.mark.slow) for c in SWEEP],
)
def test_an_update_takes_what_its_schedule_does(copy_time: float, schedule: str, cards: int, microbatches: int) -> None:
    found = taken(schedule, cards, microbatches)
    assert ideal(schedule, cards, microbatches) / found >= SHARE
