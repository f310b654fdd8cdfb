"""Local batches in which nothing counts, whose loss is a constant then: what the parity matrix
hasn't of them.

Found by trial: ranks of ``fsdp`` and of an overlapped ``ddp`` waited for a backward that never
came, and so did batch norms over all replicas.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Job, train
from lockstep.errors import LossError
from lockstep.strategies import named
from lockstep.strategies.ddp import DDP

from harness import parity  # isort: skip
from zoo import NOTHING, SAMPLES, ZOO, zero_for_none  # isort: skip


class Blocks(nn.Module):
    """The loss doesn't read its aside, so there is no gradient of it: weight decay must not move
    it.
    """

    def __init__(self, *, normed: bool = False, gives_both: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d if normed else nn.Identity
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6, bias=False), norm(6), nn.Tanh()) for _ in range(2))
        )
        self.last, self.aside, self.gives_both = nn.Linear(6, 3), nn.Linear(6, 2), gives_both

    def forward(self, x: Tensor) -> Any:
        hidden = self.blocks(x)
        outputs, aside = self.last(hidden), self.aside(hidden)
        return {"main": outputs, "aside": aside} if self.gives_both else outputs


def normed() -> nn.Module:
    return Blocks(normed=True)


JOB: Job = dataclasses.replace(
    ZOO["local batches in which nothing counts"],
    model=Blocks,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
)

ORDER = [*range(6), 8, 9, 6, 7, *range(10, SAMPLES)]
PARTS: dict[str, Any] = {"accumulate": 2, "order": lambda epoch: ORDER}
"""Nothing counts for rank 0 in the last micro-batch of batch 0 and the first of batch 1, for no
rank in that of 2.
"""

OVERLAPPED = DDP(reduce="overlapped")
WAYS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ddp overlapped": (OVERLAPPED, "2xcpu", {}),
    "ddp overlapped, accumulated": (OVERLAPPED, "2xcpu", PARTS),
    "ddp overlapped, sync_batchnorm": (
        OVERLAPPED,
        "2xcpu",
        {"model": normed, "sync_batchnorm": True},
    ),
    "fsdp": ("fsdp", "2xcpu", {}),
    "fsdp, accumulated": ("fsdp", "2xcpu", PARTS),
    "fsdp, sync_batchnorm": ("fsdp", "2xcpu", {"model": normed, "sync_batchnorm": True}),
    "ddp=2xfsdp=2": (named("ddp=2xfsdp=2"), "4xcpu", {}),
}
FAST = {"ddp overlapped", "fsdp"}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in FAST else pytest.mark.slow) for way in WAYS]
)
def test_a_loss_that_is_a_constant_there_ends_where_one_device_does(way: str) -> None:
    strategy, devices, settings = WAYS[way]
    assert parity(JOB, strategy, devices, **settings).worst < 1e-10


def zero_as_float(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    total, count = zero_for_none(outputs, targets)
    return total, float(count)


def zero_as_tensor(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    return zero_for_none(outputs, targets)[0], (targets != NOTHING).sum()


def mean_times_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    """The mean of no target is NaN."""
    count = int((targets != NOTHING).sum())
    return nn.functional.cross_entropy(outputs, targets, ignore_index=NOTHING) * count, count


@pytest.mark.parametrize("loss", [zero_as_float, zero_as_tensor, mean_times_count])
@pytest.mark.parametrize("way", ["dp", pytest.param(OVERLAPPED, marks=pytest.mark.slow)])
def test_a_count_of_zero_may_be_of_any_kind(way: Any, loss: Any) -> None:
    assert parity(JOB, way, "2xcpu", loss=loss).worst < 1e-10


def of_main(outputs: Any, targets: Tensor) -> tuple[Tensor, Any]:
    return zero_for_none(outputs["main"], targets)


def of_main_with_graph(outputs: Any, targets: Tensor) -> tuple[Tensor, Any]:
    total, count = of_main(outputs, targets)
    return total + (outputs["main"] * 0).sum(), count


@pytest.mark.parametrize("way", ["ddp overlapped", "fsdp"])
def test_which_of_several_outputs_it_would_read_is_asked_for(way: str, tmp_path: Path) -> None:
    """Gradients of zero for those that it doesn't read would have weight decay move what
    computes them.
    """
    strategy, devices, _ = WAYS[way]
    job = dataclasses.replace(JOB, model=lambda: Blocks(gives_both=True), loss=of_main)
    with pytest.raises(LossError, match=r"also without items") as caught:
        train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert parity(job, strategy, devices, loss=of_main_with_graph).worst < 1e-10  # as it was told


def test_replicas_that_dont_wait_take_it_with_several_outputs() -> None:
    job = dataclasses.replace(JOB, model=lambda: Blocks(gives_both=True), loss=of_main)
    assert parity(job, "dp", "2xcpu").worst < 1e-10


@pytest.mark.parametrize("way", ["single", "ddp"])
def test_a_constant_that_counts_is_refused(way: str, tmp_path: Path) -> None:
    job = dataclasses.replace(
        ZOO["mlp"], loss=lambda outputs, targets: (torch.zeros(()), len(targets))
    )
    with pytest.raises(
        LossError,
        match=r"the loss depends on no parameter: leave out .* detach\(\), \.item\(\), argmax\(\)",
    ):
        train(
            job,
            strategy=way,
            devices="1xcpu" if way == "single" else "2xcpu",
            folder=tmp_path,
            quiet=True,
        )
