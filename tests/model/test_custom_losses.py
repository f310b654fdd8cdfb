"""Trainings in parts with losses of a person's own: those that are no sum over samples are
refused, the others give the numbers of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepError, LossError
from zoo import drawn, labels, mlp, plain_sgd

Loss = Callable[[Any, Any], Any]
TIME = 4
TRAINED = {
    "dp 2": {"strategy": "dp", "devices": "2xcpu"},
    "ddp 2": {"strategy": "ddp", "devices": "2xcpu"},
    "single, accumulate 2": {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
    "pp 2": {"strategy": "pp", "devices": "2xcpu"},
}


def job_of(loss: Loss, **fields: Any) -> lockstep.Job:
    job = lockstep.Job(
        model=mlp,
        loss=loss,
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(32, 6), labels(32, 3)),
        batch_size=8,
    )
    return job.replace(**fields)


def masked_mean(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    values, mask = targets
    return ((outputs - values).square() * mask).sum() / mask.sum()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, TIME))


@pytest.mark.sweep
@pytest.mark.parametrize("way", TRAINED)
def test_a_training_ends_in_the_update_in_which_a_mask_becomes_uneven(
    way: str, tmp_path: Path, capfd: Any
) -> None:
    """Found by trial: weights 2 to 4 % off without a line, with a mask that is uneven first in
    update 3.
    """
    mask = torch.ones(32, TIME)
    mask[20:23, 2:] = 0  # of batches of 8 in their own order: the third
    data = [(drawn(6, seed=i), (drawn(TIME, seed=100 + i), mask[i])) for i in range(32)]
    job = job_of(masked_mean, model=two_layers, train_data=data, shuffle=False)
    said = r"loss masked_mean is not a mean over samples in step 3 .*return \(total, count\)"
    with pytest.raises(LossError, match=said):
        lockstep.train(job, quiet=True, folder=tmp_path, **TRAINED[way])
    lockstep.train(job, accept_differences=True, folder=tmp_path, **TRAINED[way])
    logged = " ".join(capfd.readouterr().out.split())
    assert logged.count("is not a mean over samples in step 3 ") == 1
    assert "this difference is accepted" in logged


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, targets, reduction="sum"), len(targets)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def hardest(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Of more samples than a local batch has."""
    each = F.cross_entropy(outputs, targets, reduction="none")
    return each.topk(min(6, len(each))).values.sum(), len(targets)


def labelled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    known = targets >= 0
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none") * known
    return each.sum() / known.sum().clamp(min=1) * len(targets), len(targets)


def with_a_largest_part(outputs: Tensor, targets: Tensor) -> lockstep.Loss:
    return lockstep.Loss(*pair(outputs, targets), parts={"largest": (outputs.max(), 1)})


OF_THE_BATCH = {
    "a sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), "a sum, its value depends"),
    "pairs": (contrastive, "is not a mean over samples"),
    "the hardest": (hardest, "the total is not a sum over samples"),
    "labels on one rank only": (labelled, "the total is not a sum over samples"),
    "a part": (with_a_largest_part, 'of part "largest" of the loss is'),
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dp 2", "single, accumulate 2", "ddp 2"])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_needs_the_whole_batch_trains_where_no_batch_is_cut_only(
    name: str, way: str, tmp_path: Path
) -> None:
    loss, said = OF_THE_BATCH[name]
    targets = labels(32, 3)
    if name == "labels on one rank only":
        targets[torch.arange(32) % 8 >= 4] = -1
    data = TensorDataset(drawn(32, 6), targets)
    job = job_of(loss, train_data=data, shuffle=False)
    where = {"folder": tmp_path, "quiet": True}
    run = lockstep.train(job, strategy="single", devices="1xcpu", **where)
    assert run.summary["steps"] == 4
    with pytest.raises(LockstepError, match=said):
        lockstep.train(job, **where, **TRAINED[way])


def mean_times_items(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    known = targets >= 0
    each = F.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * known).sum() / known.sum() * known.sum(), known.sum()


@pytest.mark.parametrize("labelled_samples", [0, 3])
def test_parts_without_an_item_add_up(labelled_samples: int, tmp_path: Path) -> None:
    """Their total is NaN times 0, as is the gradient."""
    known = torch.arange(8) < labelled_samples
    targets = torch.cat([labels(8, 3), labels(8, 3).where(known, -1)])
    job = job_of(mean_times_items, train_data=TensorDataset(drawn(16, 6), targets), shuffle=False)
    one, two = (
        lockstep.train(job, strategy=way, devices=on, folder=tmp_path, quiet=True)
        for way, on in (("single", "1xcpu"), ("dp", "2xcpu"))
    )
    assert one.history[-1]["train_loss"] == pytest.approx(two.history[-1]["train_loss"], rel=1e-5)


class Squeezing(nn.Module):
    """Of one sample it gives a row less."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


@pytest.mark.parametrize(("way", "samples"), [("single", 9), ("dp", 10)])
def test_outputs_without_a_row_for_the_only_sample_are_explained(
    way: str, samples: int, tmp_path: Path
) -> None:
    data = TensorDataset(drawn(samples, 6), labels(samples, 3))  # in batches of 8
    job = job_of(nn.CrossEntropyLoss(), model=Squeezing, train_data=data)
    where = {"strategy": way, "devices": "1xcpu" if way == "single" else "2xcpu"}
    said = r"of a local batch of one sample: .* squeeze\(\), name the dimension"
    with pytest.raises(LossError, match=said):
        lockstep.train(job, folder=tmp_path, quiet=True, **where)


def counted(outputs: Tensor, targets: tuple[Tensor, int]) -> tuple[Tensor, int]:
    values, items = targets
    return F.cross_entropy(outputs, values, reduction="sum"), items


def with_items(samples: list[Any]) -> Any:
    inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
    return inputs, (targets, len(samples))


def test_a_number_of_items_that_collate_counts_is_that_of_a_part_too(tmp_path: Path) -> None:
    """Found by trial: a part of a local batch has the number of all, and a right loss was
    refused.
    """
    job = job_of(counted, collate=with_items)
    run = lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert run.summary["steps"] == 4


def test_a_loss_that_writes_to_its_arguments_trains_as_on_one_device(tmp_path: Path) -> None:
    def scaled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs.mul_(0.5), targets, reduction="sum"), len(targets)

    job = job_of(scaled, precision="fp64")
    one, two = (
        lockstep.train(job, strategy=way, devices=on, folder=tmp_path, quiet=True).model()
        for way, on in (("single", "1xcpu"), ("dp", "2xcpu"))
    )
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)
