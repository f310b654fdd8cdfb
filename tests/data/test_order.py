"""The order of an epoch: a permutation in blocks, subsets, and orders by the person."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lockstep import train
from lockstep.data import Loader, permutation
from lockstep.data.fetch import lookup_of
from lockstep.errors import JobError
from zoo import ZOO


def unevenness(cells: torch.Tensor, count: int) -> float:
    """How far the numbers in ``count`` cells are from even, in units of what chance gives (chi
    squared).
    """
    found = torch.bincount(cells, minlength=count).double()
    mean = len(cells) / count
    return abs(float(((found - mean) ** 2 / mean).sum()) - count) / math.sqrt(2 * count)


def test_blocks_of_an_order_dont_show_in_its_batches() -> None:
    for size in (3, 300, 2**15 + 1, 2**17):
        batches = list(
            Loader(TensorDataset(*[torch.arange(2**16 + 5)] * 2), batch_size=size, seed=1).epoch(
                0, 2
            )
        )
        wanted = permutation(2**16 + 5, 1, 0)[2 * size :]
        assert torch.equal(
            torch.cat([b.samples for b in batches]) if batches else wanted[:0], wanted
        )


@pytest.mark.parametrize(
    "indices", [list, np.array, torch.tensor, lambda i: np.array(i, dtype=np.int32)]
)
def test_subsets_of_subsets_are_looked_up(indices: Any) -> None:
    levels = [indices([2, -1, 0]), range(10, 30, 5), indices([i * 3 - 40 for i in range(40)])]
    base = range(1000)
    found = [base[levels[2][levels[1][levels[0][i]]]] for i in range(3)]
    dataset: Any = base
    for level in reversed(levels):
        dataset = Subset(dataset, level)
    assert lookup_of(dataset).tolist() == found == [20, 35, 990]


# ---- orders by the person ------------------------------------------------------------------------


def weighted(epoch: int) -> torch.Tensor:
    """Sample i is drawn, with replacement, in proportion to i."""
    return torch.multinomial(torch.arange(50.0), 2000, replacement=True)


def test_a_weighted_order_is_the_same_on_each_rank_and_follows_the_weights() -> None:
    data = TensorDataset(torch.arange(50), torch.arange(50))
    ranks = [Loader(data, batch_size=32, rank=r, world_size=2, order=weighted) for r in (0, 1)]
    for epoch in (0, 1):
        batches = list(zip(*(loader.epoch(epoch) for loader in ranks), strict=True))
        assert all(torch.equal(a.samples, b.samples) for a, b in batches)
        read = torch.cat([b.parts[0].inputs for shares in batches for b in shares])
        assert len(read) == 2000
        assert unevenness(read // 10, 5) > 20, "later samples are drawn more often"
        assert 32 < float(read.double().mean()) < 34, "33 is expected"
    first, second = (torch.cat([b.samples for b in ranks[0].epoch(e)]) for e in (0, 1))
    assert not torch.equal(first, second)


def by_the_process(epoch: int) -> torch.Tensor:
    return torch.randperm(29, generator=torch.Generator().manual_seed(os.getpid()))


def test_an_order_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], order=by_the_process)
    with pytest.raises(
        JobError, match="order: for epoch 0 the indices on rank 1 differ from those on rank 0"
    ):
        train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_replicas_of_one_process_share_an_order() -> None:
    called = []

    def order(epoch: int) -> torch.Tensor:
        called.append(epoch)
        return torch.randperm(50)

    data = TensorDataset(torch.arange(50), torch.arange(50))
    loader = Loader(data, rank=None, world_size=3, batch_size=16, order=order)
    read = torch.cat(
        [p.inputs for b in loader.epoch(1) for share in b.shares for p in share if p.size]
    )
    assert sorted(read.tolist()) == list(range(50))
    assert called == [0, 1]


LENGTHS = torch.randint(1, 100, (203,), generator=torch.Generator().manual_seed(1))


def grouped(epoch: int) -> torch.Tensor:
    """Batches of 8 of similar lengths, the batches shuffled."""
    by_length = torch.argsort(LENGTHS + torch.rand(len(LENGTHS)))
    full = by_length[: len(by_length) // 8 * 8].view(-1, 8)
    return torch.cat([full[torch.randperm(len(full))].flatten(), by_length[full.numel() :]])


def test_a_grouped_order_has_batches_of_similar_lengths_on_each_rank() -> None:
    data = TensorDataset(LENGTHS, torch.arange(203))
    ranks = [Loader(data, batch_size=8, rank=r, world_size=3, order=grouped) for r in range(3)]
    batches = list(zip(*(loader.epoch(1) for loader in ranks), strict=True))
    seen = []
    for shares in batches:
        lengths = torch.cat([b.parts[0].inputs for b in shares])
        assert torch.equal(lengths, LENGTHS[shares[0].samples])
        assert int(lengths.max() - lengths.min()) < 12
        seen += shares[0].samples.tolist()
    assert sorted(seen) == list(range(203))
