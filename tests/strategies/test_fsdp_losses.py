"""``fsdp`` where the loss reads parameters of the model itself, by a global."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import launch, parallelize, train
from lockstep.errors import StrategyError
from lockstep.strategies.fsdp import FSDP

from harness import parity  # isort: skip
from zoo import ZOO, drawn, mlp, sgd  # isort: skip

held: dict[str, nn.Module] = {}


def holding() -> nn.Module:
    held["model"] = mlp()
    return held["model"]


def of_one(model: nn.Module) -> torch.Tensor:
    return model[0].weight.square().sum()


def of_all(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def of_numbers(model: nn.Module) -> Any:
    return model[0].weight.detach().norm().item()


def of_outputs(model: nn.Module) -> torch.Tensor:
    return model[0](torch.ones(2, 6, dtype=torch.float64)).square().sum()


def of_state(model: nn.Module) -> torch.Tensor:
    return model.state_dict()["0.weight"].square().sum()


def of_forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 6, dtype=torch.float64)).square().sum()


class Penalizing:
    def __init__(self, penalty: Any) -> None:
        self.penalty = penalty

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) + 0.1 * self.penalty(held["model"])


@pytest.mark.sweep
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("penalty", [of_one, of_all, of_numbers, of_outputs])
def test_a_loss_may_read_what_is_in_no_block(penalty: Any, accumulate: int) -> None:
    job = ZOO["mlp"].replace(model=holding, loss=Penalizing(penalty), accumulate=accumulate)
    found = parity(job, FSDP(blocks=""), devices="2xcpu")
    assert found.worst < 1e-12
    assert max(found.history.values()) < 1e-12


OUTSIDE = "a parameter of a block is used outside of the block's forward"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("penalty", "blocks", "says"),
    [
        (of_one, "0", OUTSIDE),
        (of_state, "", OUTSIDE),
        (of_outputs, "0", "the loss calls a sharded model"),
        (of_forward, "", "the loss calls a sharded model"),
    ],
)
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_loss_that_reads_shards_is_refused(
    penalty: Any, blocks: str, says: str, evaluates: bool, tmp_path
) -> None:
    job = ZOO["mlp"].replace(model=holding, loss=Penalizing(penalty))
    job = job if evaluates else job.replace(eval_data=None, metrics={})
    if penalty is of_state and evaluates:  # the loss then reads what forward has gathered
        found = parity(job, FSDP(blocks=blocks), devices="2xcpu")
        assert found.worst < 1e-12 and max(found.history.values()) < 1e-12
        return
    with pytest.raises(StrategyError, match=says):
        train(
            job,
            strategy=FSDP(blocks=blocks),
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
            timeout=20,
        )


def other_shards(world: Any, kind: str) -> str:
    """A generator's loss calls the discriminator, which has a step of its own."""
    generator, judge = mlp(), nn.Linear(3, 1)

    class Fooling:
        def __init__(self) -> None:
            self.judge = judge

        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.judge(outputs).square().mean()

    loss = (
        Fooling() if kind == "object" else lambda outputs, targets: judge(outputs).square().mean()
    )
    step = parallelize(generator, loss, sgd, strategy="fsdp")
    parallelize(judge, nn.MSELoss(), sgd, strategy="fsdp")
    try:
        step(drawn(4, 6), drawn(4, 3))
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["function", "object"])
def test_a_loss_that_calls_another_sharded_model_is_refused(kind: str) -> None:
    """Ranks check a loss as their times suggest, so that they stood still in the other model."""
    for said in launch(other_shards, devices="2xcpu", args=(kind,)):
        assert said.startswith("fsdp: the loss calls a sharded model"), said
