"""The order of an epoch: a permutation computed slice by slice, orders by the person, and what a
long dataset costs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import lockstep
from lockstep import train
from lockstep.data import Loader, permutation
from lockstep.data import order as order_module
from lockstep.data.fetch import lookup_of
from lockstep.data.order import Ascending, Scattered
from lockstep.errors import JobError
from zoo import ZOO


def whole(order: Any) -> torch.Tensor:
    return order[0 : len(order)]


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, 5, 7, 10, 99, 100, 101, 1000, 65_537, 999_983, 2**20 + 1, 2**20 + 1025]
)
def test_every_sample_is_in_a_computed_permutation_once(n: int) -> None:
    assert torch.equal(whole(Scattered(n, seed=3, epoch=1)).sort().values, torch.arange(n))


def test_a_slice_of_a_computed_permutation_is_that_of_the_whole() -> None:
    order = Scattered(2**20 + 7, seed=1, epoch=2)
    found = whole(order)
    for start, stop in ((0, 1), (5, 5), (1000, 70_000), (2**20, 2**20 + 7), (2**20 + 6, 2**21)):
        assert torch.equal(order[start:stop], found[start:stop])


def test_up_to_a_million_samples_the_permutation_is_pytorchs_own() -> None:
    assert isinstance(permutation(2**20, 0, 0), torch.Tensor)
    assert isinstance(permutation(2**20 + 1, 0, 0), Scattered)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In units of what chance gives."""
    return abs(float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])) * math.sqrt(len(a))


def unevenness(cells: torch.Tensor, count: int) -> float:
    """How far the numbers in ``count`` cells are from even, in units of what chance gives (chi
    squared).
    """
    found = torch.bincount(cells, minlength=count).double()
    mean = len(cells) / count
    return abs(float(((found - mean) ** 2 / mean).sum()) - count) / math.sqrt(2 * count)


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=pytest.mark.slow) for n in (2**20 + 1, 3_000_017)]
)
def test_a_computed_permutation_is_well_mixed(n: int) -> None:
    place = torch.arange(n)
    for seed in range(3):
        found = whole(Scattered(n, seed, epoch=0))
        for other in (
            whole(Scattered(n, seed, epoch=1)),
            whole(Scattered(n, seed + 1, epoch=0)),
            place,
        ):
            assert correlation(found, other) < 5
            assert int((found == other).sum()) < 15, "one is expected by chance"
        assert unevenness(place * 64 // n * 64 + found * 64 // n, 4096) < 6, (
            "each part of the data is in each part"
        )
        assert unevenness(place % 32 * 32 + found % 32, 1024) < 6
        for apart in (1, 2, math.isqrt(n), -(-n // math.isqrt(n))):
            assert correlation(found[apart:], found[:-apart]) < 5
            assert unevenness((found[apart:] - found[:-apart]) % n * 1024 // n, 1024) < 6
        assert int((found[1:] - found[:-1] == 1).sum()) < 15


class Long(Dataset[Any]):
    """Samples that are computed, so that only the order could take memory."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i % 7)]), i


@pytest.mark.parametrize("kind", ["samples", "tensors", "subset"])
def test_a_computed_order_is_cut_and_resumed_as_any_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "_IN_MEMORY", 100)
    n = 1003
    tensors = TensorDataset(torch.arange(5 * n), -torch.arange(5 * n))
    dataset = {
        "samples": Long(n),
        "tensors": Subset(tensors, range(n)),
        "subset": Subset(tensors, range(7, 2013, 2)),
    }
    order = whole(Scattered(n, 5, 2))
    ranks = [
        Loader(dataset[kind], batch_size=8, rank=r, world_size=3, seed=5, workers=0)
        for r in range(3)
    ]
    batches = list(zip(*(loader.epoch(2) for loader in ranks), strict=True))
    assert len(batches) == len(ranks[0]) == 126
    assert torch.equal(torch.cat([b[0].samples for b in batches]), order)
    assert torch.equal(torch.cat([b.parts[0].samples for shares in batches for b in shares]), order)
    read = torch.cat([b.parts[0].targets for shares in batches for b in shares if b.parts[0].size])
    assert torch.equal(
        read, {"samples": order, "tensors": -order, "subset": -(order * 2 + 7)}[kind]
    )
    for start in (0, 1, 77, 125, 126):
        assert [b.samples.tolist() for b in ranks[1].epoch(2, start)] == [
            b[0].samples.tolist() for b in batches[start:]
        ]


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


def test_without_shuffle_the_order_is_not_kept_either() -> None:
    loader = Loader(Long(10**12), batch_size=4, shuffle=False, workers=0)
    assert isinstance(loader.orders(0), Ascending)
    assert next(loader.epoch(0, 10**11)).samples.tolist() == [4 * 10**11 + i for i in range(4)]


def test_a_trillion_samples_are_shuffled_at_once() -> None:
    loader = Loader(Long(10**12), batch_size=4, workers=0)
    first, far = next(loader.epoch(0)).samples, next(loader.epoch(0, 10**11)).samples
    assert len({*first.tolist(), *far.tolist()}) == 8 and int(first.max()) < 10**12


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


# ---- what a long dataset costs -------------------------------------------------------------------


class Computed(Dataset[Any]):
    """A hundred million samples, none of them in memory."""

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, i: int) -> Any:
        return torch.full((6,), i % 11 / 11), i % 3


class Sampled:
    """The memory of this process's descendants while it lasts: the sum of what is theirs alone and
    of their parts of what they share (PSS), in bytes, at its peak.
    """

    def __enter__(self) -> Sampled:
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            here = psutil.Process().children(recursive=True)
            self.peak = max(self.peak, sum(proportional(process.pid) for process in here))


def proportional(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs smaps_rollup")
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_hundred_million_samples_take_no_memory_on_any_rank(
    shuffle: bool, tmp_path: Path
) -> None:
    def timed(event: lockstep.Event) -> None:
        (tmp_path / event.kind).write_text(str(time.monotonic()))

    job = ZOO["mlp"].replace(
        train_data=Computed(),
        eval_data=None,
        metrics={},
        batch_size=256,
        epochs=1,
        steps=40,
        shuffle=shuffle,
        on_event=[timed],
    )
    with Sampled() as memory:
        run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    begun = [float((tmp_path / kind).read_text()) for kind in ("started", "epoch")]
    print(
        f"{memory.peak / 2**20:,.0f} MB over all ranks; 40 steps took {begun[1] - begun[0]:.2f} s"
    )
    assert run.summary["steps"] == 40 and run.summary["train_samples"] == 100_000_000
    assert memory.peak < 1.2e9
