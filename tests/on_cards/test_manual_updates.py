"""On cards: the updates of a step function, and of a loop that accumulates by hand, are those of
one CPU device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, train

from harness import differences  # isort: skip
from zoo import SAMPLES, drawn, labels, mlp, plain_sgd, sgd

BOUND = 1e-10
WAYS = {"single": "card:1", "dp": "card:0,1", "ddp": "card:0,1"}
SIZES = [[5, 3, 1], [2], [1, 7]]


def both(models: nn.ModuleDict, batch: Any, update: Any) -> None:
    """A head that counts some samples only, in some local batches none, and a body that moves
    after it.
    """
    x, y = batch
    hidden = models["body"](x)
    logits = models["head"](hidden.detach())
    update(
        "head",
        nn.functional.cross_entropy(logits, y, ignore_index=1, reduction="sum"),
        (y != 1).sum(),
    )
    update("body", nn.functional.cross_entropy(models["head"](hidden), y, reduction="sum"), len(y))


def job() -> Job:
    return Job(
        model=lambda: {"head": nn.Linear(4, 3), "body": nn.Sequential(nn.Linear(6, 4), nn.Tanh())},
        optimizer={"head": plain_sgd, "body": sgd},
        step=both,
        train_data=TensorDataset(drawn(SAMPLES, 6), labels(SAMPLES, 3)),
        batch_size=7,
        epochs=2,
        clip_norm=0.3,
        precision="fp64",
    )


@pytest.mark.parametrize("way", ["single", "ddp"])
def test_a_step_function_on_cards_ends_where_one_device_does(way: str, tmp_path: Path) -> None:
    expected = train(job(), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    found = differences(
        job(), train(job(), strategy=way, devices=WAYS[way], folder=tmp_path, quiet=True), expected
    )
    assert found.within(BOUND), str(found)


def by_hand(strategy: str, devices: Any, world: Any = None) -> Tensor:
    torch.manual_seed(0)
    model = mlp()
    step = lockstep.parallelize(
        model,
        nn.CrossEntropyLoss(),
        plain_sgd,
        strategy=strategy,
        devices=devices,
        precision="fp64",
    )
    number = 0
    for sizes in SIZES:
        for size in sizes:
            x, y = drawn(size, 6, seed=number), labels(size, 3, seed=number)
            y[0] = -100 if size > 2 else y[0]
            number += 1
            if world is not None:
                start, end = (0, -(-size // 2)) if world.rank == 0 else (-(-size // 2), size)
                x, y = x[start:end], y[start:end]
            step.backward(x, y) if len(x) else step.backward(None)
        step.update()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_added_up_by_hand_on_cards_are_those_of_one_device(way: str) -> None:
    expected = by_hand("single", "1xcpu")
    if way == "ddp":
        ends = lockstep.launch(lambda world: by_hand("ddp", "auto", world), devices=WAYS[way])
    else:
        ends = [by_hand(way, WAYS[way])]
    for end in ends:
        assert (end - expected).abs().max() < BOUND


def mean_times_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over no label is NaN, and so is that times 0."""
    count = (targets != -100).sum()
    return nn.functional.cross_entropy(outputs, targets) * count, count


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_local_batch_without_a_label_after_the_first_update_counts_nothing(
    way: str, tmp_path: Path
) -> None:
    """Found by trial: the total of all devices was NaN, which ended the training."""
    targets = labels(24, 3)
    targets[16:20] = -100
    settings = Job(
        model=mlp,
        loss=mean_times_count,
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(24, 6), targets),
        batch_size=8,
        shuffle=False,
        precision="fp64",
    )
    expected = train(settings, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(settings, strategy=way, devices=WAYS[way], folder=tmp_path, quiet=True)
    found = differences(settings, run, expected)
    assert found.within(BOUND), str(found)
