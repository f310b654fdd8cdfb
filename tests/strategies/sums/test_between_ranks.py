"""Models that communicate by themselves, or write parameters alike on every rank, train under
``ddp`` and ``fsdp`` with the results of ``single``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.errors import StrategyError

from zoo import drawn, plain_sgd, slow  # isort: skip

RANKS = ["ddp", slow("fsdp")]


def gathered(features: torch.Tensor) -> torch.Tensor:
    """The features of all ranks, with gradients; of one process its own."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return features
    return torch.cat(all_gather(features.contiguous()))


class TwoTowers(nn.Module):
    """Images and texts, compared with those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(6, 4)
        self.text = nn.Linear(5, 4)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(image), self.text(text)


def contrast(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Each image of this rank against the texts of all ranks."""
    image, text = outputs
    texts = gathered(text)
    first = dist.get_rank() * len(image) if len(texts) > len(image) else 0
    own = torch.arange(first, first + len(image))
    return nn.functional.cross_entropy(image @ texts.T, own, reduction="sum"), len(targets)


def two_towers(loss: Any = contrast, **settings: Any) -> Job:
    data = TensorDataset(drawn(24, 6), drawn(24, 5, seed=2), torch.zeros(24))
    return Job(
        model=TwoTowers,
        loss=loss,
        optimizer=plain_sgd,
        train_data=data,
        collate=together,
        batch_size=8,
        precision="fp64",
        **settings,
    )


def together(samples: list[Any]) -> Any:
    image, text, target = zip(*samples, strict=True)
    return (torch.stack(image), torch.stack(text)), torch.stack(target)


class Codebook(nn.Module):
    """Statistics of all ranks' samples are summed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.body(inputs)
        if self.training:
            sums = torch.cat([features.detach().sum(0), features.new_tensor([len(features)])])
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(sums)
            self.mean.copy_(0.9 * self.mean + 0.1 * sums[:-1] / sums[-1])
        return features - self.mean.clone()


class MomentumEncoder(nn.Module):
    """A second encoder that follows the first one, in each forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.key = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)
        for p in self.key.parameters():
            p.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    key.mul_(0.9).add_(query, alpha=0.1)
        return self.head(self.query(inputs) + self.key(inputs))


def regression(model: Any, **settings: Any) -> Job:
    return Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(24, 6), drawn(24, 3, seed=2)),
        batch_size=8,
        precision="fp64",
        **settings,
    )


codebook = functools.partial(regression, Codebook)
momentum = functools.partial(regression, MomentumEncoder)


def weights(job: Job, strategy: str, folder: Path) -> torch.Tensor:
    devices = "1xcpu" if strategy == "single" else "2xcpu"
    run = lockstep.train(job, strategy=strategy, devices=devices, folder=folder, quiet=True)
    state = run.model().state_dict()
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("kind", [two_towers, codebook])
def test_a_model_that_communicates_by_itself_has_the_results_of_single(
    kind: Any, strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = weights(kind(epochs=2), "single", tmp_path)
    job = kind(epochs=2)
    run = lockstep.train(job, strategy=strategy, devices="2xcpu", folder=tmp_path)
    found = torch.cat([value.flatten() for value in run.model().state_dict().values()])
    assert (found - expected).abs().max() < 1e-10
    said = capfd.readouterr().out
    assert "the sum check of an update is left out: the model, or its loss, communicates" in said


@pytest.mark.parametrize("strategy", RANKS)
def test_a_parameter_that_forward_writes_alike_on_every_rank_trains(
    strategy: str, tmp_path: Path
) -> None:
    expected = weights(momentum(epochs=2), "single", tmp_path)
    found = weights(momentum(epochs=2), strategy, tmp_path)
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_a_parameter_that_forward_writes_is_refused_where_replicas_share_it(
    strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=r'the model writes its parameter "key.weight" in forw'):
        weights(momentum(epochs=1), strategy, tmp_path)


def loop_of_two_towers(world: Any) -> torch.Tensor:
    torch.manual_seed(0)
    where = {"devices": 1} if world is None else {}
    model = TwoTowers().double()
    step = lockstep.parallelize(model, contrast, plain_sgd, precision="fp64", **where)
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    for number in range(3):
        image = drawn(8, 6, seed=number).double()
        text = drawn(8, 5, seed=10 + number).double()
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        step((image[mine], text[mine]), torch.zeros(8)[mine])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_loop_of_ones_own_may_gather_features_over_ranks() -> None:
    expected = loop_of_two_towers(None)
    for found in lockstep.launch(loop_of_two_towers, devices="2xcpu"):
        assert (found - expected).abs().max() < 1e-10
