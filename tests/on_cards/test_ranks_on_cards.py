"""Ranks with a card, or several, each: what they have of one another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.launch.world import World
from lockstep.strategies import fsdp
from lockstep.strategies.fsdp import FSDP
from simulated_card import counts
from zoo import Residual


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def crossings_where_one_rank_has_a_sample(world: World) -> int:
    data = TensorDataset(torch.randn(9, 6), torch.zeros(9, dtype=torch.long))
    job = Job(
        model=lambda: nn.Linear(6, 4),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=4,
    )
    way = FSDP()
    step = way.prepare(job, world)
    for batch in way.training_loader(job, world, data).epoch(0):  # the last one has one sample
        step.update(batch)
    return counts("crossings")["crossings"]


def test_a_sample_that_another_rank_computes_too_comes_over_the_cpu() -> None:
    """Else it would come to be on the card of the rank that has it, in a second context there."""
    assert lockstep.launch(crossings_where_one_rank_has_a_sample, "card:0,1") == [0, 0]


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
    way = lockstep.strategies.named("ddp=2xpp=2", device_map={"0": 0, "1": 1}, microbatches=1)
    step = lockstep.parallelize(model, nn.CrossEntropyLoss(), sgd, strategy=way)
    for _ in range(3):
        step(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
    return [str(values.tolist()) for values in drawn]


def test_replicas_of_stages_draw_numbers_of_their_own_on_each_card() -> None:
    one, other = lockstep.launch(masks_of_two_stages, "card:0,1,2,3", devices_per_rank=2)
    assert one and not set(one) & set(other)


def peak_of_an_update(world: World, precision: str) -> int:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 256), nn.Sequential(*(Residual(256) for _ in range(32))), nn.Linear(256, 3)
        )

    job = Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=(),
        batch_size=16,
        precision=precision,
    )
    step = FSDP().prepare(job, world)
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats(world.device.torch)
        step(torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    return torch.accelerator.max_memory_allocated(world.device.torch)


@pytest.mark.slow
def test_an_update_under_bf16_keeps_no_narrow_copy_of_all_weights() -> None:
    """On four ranks that would be half as much again as all that a rank keeps."""
    wide, narrow = (
        lockstep.launch(peak_of_an_update, "card:0,1,2,3", (p,))[1] for p in ("fp32", "bf16")
    )
    assert narrow <= 1.05 * wide


def last_check_with_little_room(world: World, room: int) -> tuple[float, list[str]]:
    fsdp.free_memory = lambda device: room  # type: ignore[assignment]
    said: list[str] = []
    world.emit = lambda event: said.append(str(event))
    data = TensorDataset(torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    job = Job(
        model=lambda: nn.Linear(6, 4),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=4,
    )
    step = FSDP().prepare(job, world)
    step(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
    return step.sums.last, said


def test_a_model_that_a_card_has_no_room_for_is_not_put_together_on_it() -> None:
    """With its gradients, and one more copy."""
    (last, said), (others, _) = lockstep.launch(last_check_with_little_room, "card:0,1", (335,))
    assert last == others == 0
    text = "a device has no room for all 112 B: the sum check is left out"
    assert any(text in line for line in said)
    every = lockstep.launch(last_check_with_little_room, "card:0,1", (336,))
    assert [last for last, _ in every] == [math.inf] * 2
