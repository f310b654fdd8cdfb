"""Local batches in which nothing counts, whose loss a person's function gives as a constant.

Found by trial: ranks of ``fsdp`` and of an overlapped ``ddp`` waited for a backward that never came, and so did batch
norms over all replicas.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lockstep import Job, train
from lockstep.errors import LossError
from lockstep.strategies import named
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP
from lockstep.verify import parity

from zoo import ZOO, drawn, labels  # isort: skip

SAMPLES, MASKED = 29, -100


class Normed(nn.Module):
    """Its aside has no gradient, since no loss reads it: weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2))
        )
        self.last, self.aside = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(x)
        self.aside(hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


class Plain(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))


def zero_for_none(outputs: Tensor, targets: Tensor, zero: Any = 0) -> tuple[Tensor, Any]:
    counts = targets != MASKED
    if not counts.any():
        return torch.zeros(()), zero
    return cross_entropy(outputs[counts], targets[counts], reduction="sum"), int(counts.sum())


def zero_as_float(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    return zero_for_none(outputs, targets, 0.0)


def zero_as_tensor(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    return zero_for_none(outputs, targets, (targets != MASKED).sum())


def halves_masked() -> TensorDataset:
    """The second half of batch 0, the first of batch 2, and the smaller last one's begin."""
    targets = labels(SAMPLES, 3)
    for begin, end in ((4, 8), (16, 20), (24, 27)):
        targets[begin:end] = MASKED
    return TensorDataset(drawn(SAMPLES, 6), targets)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


JOB = Job(
    model=Plain, loss=zero_for_none, optimizer=adamw, train_data=halves_masked(), batch_size=8, epochs=2, shuffle=False
)

WAYS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "dp": ("dp", "2xcpu", {}),
    "ddp flat": (DDP(reduce="flat"), "2xcpu", {}),
    "ddp overlapped": (DDP(reduce="overlapped"), "2xcpu", {}),
    "ddp overlapped, accumulated": (DDP(reduce="overlapped"), "2xcpu", {"accumulate": 2, "order": lambda _: ORDER}),
    "fsdp": ("fsdp", "2xcpu", {}),
    "fsdp, accumulated": (FSDP(sync_each_microbatch=False), "2xcpu", {"accumulate": 2, "order": lambda _: ORDER}),
    "pp": ("pp", "2xcpu", {}),
    "mp": ("mp", "2xcpu", {}),
    "ddp=2xpp=2": (named("ddp=2xpp=2"), "4xcpu", {}),
    "ddp=2xfsdp=2": (named("ddp=2xfsdp=2"), "4xcpu", {}),
    "sync dp": ("dp", "2xcpu", {"model": Normed, "sync_batchnorm": True}),
    "sync ddp flat": (DDP(reduce="flat"), "2xcpu", {"model": Normed, "sync_batchnorm": True}),
    "sync ddp overlapped": (DDP(reduce="overlapped"), "2xcpu", {"model": Normed, "sync_batchnorm": True}),
    "sync fsdp": ("fsdp", "2xcpu", {"model": Normed, "sync_batchnorm": True}),
    "sync ddp=2xmp=2": (named("ddp=2xmp=2"), "4xcpu", {"model": Normed, "sync_batchnorm": True}),
}
ORDER = [*range(6), 8, 9, 6, 7, *range(10, SAMPLES)]
"""In which rank 1 has items in the first micro-batch of batch 0 only, and rank 0 in the second one of batch 2."""

FAST = {"ddp overlapped", "fsdp", "sync dp", "sync ddp overlapped"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FAST else pytest.mark.slow) for way in WAYS])
def test_a_loss_that_is_a_constant_there_ends_where_one_device_does(way: str) -> None:
    strategy, devices, settings = WAYS[way]
    assert parity(JOB, strategy, devices, **settings).worst < 1e-10


@pytest.mark.parametrize("loss", [zero_as_float, zero_as_tensor])
@pytest.mark.parametrize("way", ["dp", pytest.param("ddp overlapped", marks=pytest.mark.slow)])
def test_a_count_of_zero_may_be_of_any_kind(way: str, loss: Any) -> None:
    strategy, devices, _ = WAYS[way]
    assert parity(JOB.replace(loss=loss), strategy, devices).worst < 1e-10


class Several(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = self.blocks(x)
        return {"main": self.last(hidden), "aside": self.aside(hidden)}


def of_main(outputs: Any, targets: Tensor) -> tuple[Tensor, Any]:
    return zero_for_none(outputs["main"], targets)


def of_main_with_graph(outputs: Any, targets: Tensor) -> tuple[Tensor, Any]:
    total, count = of_main(outputs, targets)
    return total + (outputs["main"] * 0).sum(), count


@pytest.mark.parametrize("way", ["ddp overlapped", "fsdp"])
def test_which_of_several_outputs_it_would_read_is_asked_for(way: str, tmp_path: Path) -> None:
    """Gradients of zero for those that it doesn't read would have weight decay move what computes them."""
    strategy, devices, _ = WAYS[way]
    job = JOB.replace(model=Several, loss=of_main)
    with pytest.raises(LossError, match=r"where nothing counts") as caught:
        train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert parity(job.replace(loss=of_main_with_graph), strategy, devices).worst < 1e-10  # as it was told


def test_replicas_that_dont_wait_take_it_with_several_outputs() -> None:
    assert parity(JOB.replace(model=Several, loss=of_main), "dp", "2xcpu").worst < 1e-10


@pytest.mark.parametrize("way", ["single", "ddp"])
def test_a_constant_that_counts_is_refused(way: str, tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], loss=lambda outputs, targets: (torch.zeros(()), len(targets)))
    with pytest.raises(LossError, match="the loss depends on no parameter: is the model's output detached"):
        train(job, strategy=way, devices="1xcpu" if way == "single" else "2xcpu", folder=tmp_path, quiet=True)
