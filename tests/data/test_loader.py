"""Article 1: the same batches for any number of processes, each sample once, random numbers by
sample.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import lockstep
from lockstep.data import (
    Batch,
    Loader,
    Part,
    batches,
    default_workers,
    loader_workers,
    mixed,
    permutation,
    resolve,
)
from lockstep.data.loader_workers import workers_here
from lockstep.errors import JobError, SampleError
from lockstep.launch import world as world_module
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.tensors.rows import share_sizes


def numbers(n: int) -> TensorDataset:
    """Sample i is (i, -i)."""
    return TensorDataset(torch.arange(n), -torch.arange(n))


class Noisy(Dataset[Any]):
    """Sample i is (i and three random numbers, i)."""

    def __init__(self, n: int = 23) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.n:
            raise IndexError(i)
        noise = torch.tensor(
            [float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64
        )
        return torch.cat([torch.tensor([i], dtype=torch.float64), noise]), i


def generators() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy_state[1].tolist(),
        numpy_state[2:],
    )


@pytest.fixture(autouse=True)
def _generators_go_on_as_if_nothing_had_happened() -> Iterator[None]:
    before = generators()
    yield
    assert generators() == before


def drawn(loader: Loader, epoch: int = 0) -> dict[int, tuple[float, ...]]:
    """What each sample of this process's shares came out as."""
    found: dict[int, tuple[float, ...]] = {}
    for batch in loader.epoch(epoch):
        for part in batch.parts:
            for row in part.inputs if part.size else ():
                assert int(row[0]) not in found
                found[int(row[0])] = tuple(row[1:].tolist())
    loader.close()
    return found


# ---- shares --------------------------------------------------------------------------------------


def test_shares_are_even_and_the_larger_first() -> None:
    assert share_sizes(10, 4) == [3, 3, 2, 2]
    assert share_sizes(2, 3) == [1, 1, 0]
    assert share_sizes(0, 2) == [0, 0]


def test_a_permutation_is_of_seed_and_epoch() -> None:
    first = permutation(100, 3, 5)
    assert torch.equal(first, permutation(100, 3, 5))
    assert sorted(first.tolist()) == list(range(100))
    for other in ((5, 3), (3, 6), (4, 5), (4, 4)):
        assert not torch.equal(first, permutation(100, *other))


def test_mixed_seeds_differ_and_fit_every_generator() -> None:
    seeds = {mixed(a, b, c) for a in range(-5, 15) for b in range(20) for c in range(20)}
    assert len(seeds) == 20 * 20 * 20
    assert all(0 <= s < 2**63 for s in seeds)
    ones = [bin(mixed(0, 0, i) ^ mixed(0, 0, i + 1)).count("1") for i in range(500)]
    assert 28 < sum(ones) / 500 < 35


SIZES = [(20, 8), (10, 4), (3, 8), (7, 7), (9, 2), (17, 5), (1, 1), (600, 2)]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("n", "size"), SIZES)
def test_a_global_batch_is_the_same_for_any_number_of_processes(
    n: int, size: int, accumulate: int
) -> None:
    for epoch in (0, 3):
        order = permutation(n, 11, epoch)
        micro_batches: list[Any] = []
        for world_size in (1, 2, 3):
            ranks = [
                list(
                    Loader(
                        numbers(n),
                        batch_size=size,
                        rank=r,
                        world_size=world_size,
                        accumulate=accumulate,
                        seed=11,
                    ).epoch(epoch)
                )
                for r in range(world_size)
            ]
            micro_batches.append([])
            for k, shares in enumerate(zip(*ranks, strict=True)):
                wanted = order[k * size : (k + 1) * size]
                for batch in shares:
                    assert (batch.size, batch.index, batch.epoch) == (len(wanted), k, epoch)
                    assert torch.equal(batch.samples, wanted)
                got: list[int] = []
                for micro in zip(*(b.parts for b in shares), strict=True):
                    assert [p.size for p in micro] == share_sizes(micro[0].of, world_size)
                    assert micro[0].of > 0 and len({p.of for p in micro}) == 1
                    rows = [int(i) for p in micro if p.size for i in p.inputs]
                    assert rows == [int(i) for p in micro for i in p.samples]
                    assert rows == [-int(i) for p in micro if p.size for i in p.targets]
                    micro_batches[-1].append(rows)
                    got += rows
                assert got == wanted.tolist()
                assert len(shares[0].parts) == min(accumulate, len(wanted))
            assert sorted(i for m in micro_batches[-1] for i in m) == list(range(n))
        assert micro_batches[0] == micro_batches[1] == micro_batches[2]


def test_a_rank_without_samples_has_an_empty_part() -> None:
    last = list(Loader(numbers(9), batch_size=8, rank=1, world_size=2).epoch(0))[-1]
    (part,) = last.parts
    assert (part.inputs, part.targets, part.size, part.of, last.size) == (None, None, 0, 1, 1)
    assert list(last) == [None, None]


def test_a_batch_comes_apart_in_inputs_and_targets() -> None:
    for inputs, targets in Loader(numbers(10), batch_size=4):
        assert torch.equal(inputs, -targets)


def test_several_micro_batches_dont_come_apart() -> None:
    batch = next(Loader(numbers(10), batch_size=4, accumulate=2).epoch(0))
    with pytest.raises(JobError, match="2 micro-batches: pass it to the step as a whole"):
        _inputs, _targets = batch
    with pytest.raises(JobError):
        list(Batch([Part(1, 1, 1, 1), Part(1, 1, 1, 1)], 2, 0, 0))


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_an_epoch_can_begin_anywhere(start: int) -> None:
    for dataset in (numbers(20), Noisy(20)):
        loader = Loader(dataset, batch_size=8, workers=0)
        whole = [(b.index, b.samples.tolist()) for b in loader.epoch(2)]
        assert [(b.index, b.samples.tolist()) for b in loader.epoch(2, start)] == whole[start:]


def test_length_and_samples_are_those_of_an_epoch() -> None:
    loader = Loader(numbers(17), batch_size=5)
    assert (len(loader), loader.samples) == (4, 17)
    assert len(Loader(numbers(17), batch_size=5, order=lambda e: [0, 1, 2, 3, 4, 5])) == 2
    assert len(Loader(numbers(3), batch_size=8)) == 1


# ---- the order -----------------------------------------------------------------------------------


def order_of(loader: Loader, epoch: int = 0) -> list[int]:
    return [i for b in loader.epoch(epoch) for i in b.samples.tolist()]


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert order_of(Loader(numbers(7), batch_size=3, shuffle=False), 4) == list(range(7))


@pytest.mark.parametrize(
    "given",
    [lambda i: i, tuple, np.array, torch.tensor, lambda i: torch.tensor(i, dtype=torch.int32)],
)
def test_a_person_may_give_the_order(given: Callable[[list[int]], Any]) -> None:
    indices = [4, 2, 2, 0]
    loader = Loader(numbers(5), batch_size=3, order=lambda epoch: given(indices))
    assert order_of(loader) == indices
    assert [int(i) for b in loader.epoch(1) for i in b.parts[0].inputs] == indices
    assert order_of(Loader(numbers(5), batch_size=3, order=lambda epoch: range(1, 4))) == [1, 2, 3]


def test_an_order_that_draws_is_the_same_on_every_rank() -> None:
    draws: list[Callable[[int], Any]] = [
        lambda e: torch.randperm(50),
        lambda e: np.random.permutation(50),
        lambda e: random.sample(range(50), 50),
    ]
    for draw in draws:
        one, two = (
            Loader(numbers(50), batch_size=8, rank=r, world_size=2, order=draw) for r in (0, 1)
        )
        assert order_of(one) == order_of(two) != order_of(one, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0, 5], "order: for epoch 0 it gave index 5, the dataset has 0 to 4"),
        ([-1], "it gave index -1"),
        ([0.5], "float32, whole numbers are expected"),
        ([True], "bool, whole numbers"),
        ([[1, 2]], r"it gave \(1, 2\), a list of indices"),
        ([], r"it gave \(0,\)"),
        ("abc", "it gave a str, a list of indices is expected"),
    ],
)
def test_an_order_that_cant_be_is_said(given: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        order_of(Loader(numbers(5), batch_size=2, order=lambda epoch: given))


# ---- randomness by sample ------------------------------------------------------------------------


def test_a_sample_comes_out_the_same_wherever_it_is_made() -> None:
    wanted = drawn(Loader(Noisy(), batch_size=23, seed=5, workers=0))
    assert len(wanted) == 23 and len(set(wanted.values())) == 23
    assert drawn(Loader(Noisy(), batch_size=4, seed=5, workers=0, shuffle=False)) == wanted
    assert drawn(Loader(Noisy(), batch_size=4, seed=5, workers=1, accumulate=3)) == wanted
    for workers in (0, 2):
        shares: dict[int, tuple[float, ...]] = {}
        for rank in range(3):
            shares |= drawn(
                Loader(Noisy(), batch_size=7, seed=5, rank=rank, world_size=3, workers=workers)
            )
        assert shares == wanted


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Noisy(), numbers(23), Subset(numbers(40), range(3, 26))])
def test_a_process_of_several_devices_gives_each_what_a_rank_would_get(
    dataset: Any, workers: int
) -> None:
    settings: Any = {
        "batch_size": 7,
        "world_size": 3,
        "accumulate": 2,
        "seed": 5,
        "workers": workers,
    }
    ranks = [Loader(dataset, rank=rank, **settings) for rank in range(3)]
    together = Loader(dataset, rank=None, **settings)
    for epoch, start in ((0, 0), (1, 2)):
        for batch, *own in zip(
            together.epoch(epoch, start), *(r.epoch(epoch, start) for r in ranks), strict=True
        ):
            assert (batch.size, batch.index, batch.epoch) == (own[0].size, own[0].index, epoch)
            assert [(p.inputs, p.size, p.of) for p in batch.parts] == [
                (None, p.of, p.of) for p in own[0].parts
            ]
            assert batch.shares is not None and len(batch.shares) == 3
            for share, parts in zip(batch.shares, (b.parts for b in own), strict=True):
                for one, other in zip(share, parts, strict=True):
                    assert (one.size, one.of) == (other.size, other.of)
                    assert torch.equal(one.samples, other.samples)
                    assert one.size == 0 or torch.equal(one.inputs, other.inputs)
                    assert one.size == 0 or torch.equal(one.targets, other.targets)
    for loader in (together, *ranks):
        loader.close()


def test_other_epochs_seeds_and_evaluation_draw_other_numbers() -> None:
    loader = Loader(Noisy(), batch_size=5, seed=5, workers=0)
    streams = [
        drawn(loader),
        drawn(loader, 1),
        drawn(Loader(Noisy(), batch_size=5, seed=6, workers=0)),
    ]
    streams.append(drawn(Loader(Noisy(), batch_size=5, seed=5, workers=0, evaluation=True)))
    values = [v for stream in streams for sample in stream.values() for v in sample]
    assert len(set(values)) == len(values) == 4 * 23 * 3


def test_a_sample_of_a_subset_draws_what_it_draws_in_the_whole() -> None:
    wanted = drawn(Loader(Noisy(), batch_size=4, workers=0))
    inner = Subset(Noisy(), [3, 1, 20, 7, -1])
    nested = drawn(Loader(Subset(inner, [4, 0, 2]), batch_size=2, workers=0))
    assert nested == {22: wanted[22], 3: wanted[3], 20: wanted[20]}


def jittered(samples: list[Any]) -> Any:
    inputs = torch.stack([x for x, _ in samples])
    return inputs + torch.rand(1), torch.tensor([y for _, y in samples])


def test_a_collate_draws_the_same_where_a_batch_is_made_again() -> None:
    subset = Subset(Noisy(), [7, 5, 3, 1])
    loader = Loader(subset, batch_size=2, workers=0, collate=jittered)
    for batch in loader.epoch(0):
        (part,) = batch.parts
        whole = batch.samples.tolist()
        (inputs, _), *_ = batch.collate([whole, whole[:1], whole[1:]])
        assert torch.equal(inputs, part.inputs)


class ByBatch(Noisy):
    """Hands out whole batches; draws numbers or not."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.calls: list[int] = []

    def __getitem__(self, i: int) -> Any:
        self.calls.append(1)
        return super().__getitem__(i) if self.draws else (torch.tensor([float(i), 0.5]), i)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        own = [self[i] for i in indices]
        self.calls[-len(indices) :] = [len(indices)]
        return own


def test_whole_batches_are_asked_for_where_nothing_is_drawn() -> None:
    quiet = ByBatch(draws=False)
    assert set(drawn(Loader(quiet, batch_size=8, workers=0))) == set(range(23))
    assert quiet.calls == [8, 8, 7]


def test_a_dataset_that_draws_is_asked_for_whole_batches_once_and_then_by_sample() -> None:
    noisy = ByBatch(draws=True)
    assert drawn(Loader(noisy, batch_size=8, workers=0)) == drawn(
        Loader(Noisy(), batch_size=8, workers=0)
    )
    assert noisy.calls == [8] + [1] * (8 + 15)


def test_draws_random_false_is_believed() -> None:
    noisy = ByBatch(draws=True)
    noisy.draws_random = False  # type: ignore[attr-defined]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn(Loader(noisy, batch_size=8, workers=0))
    assert noisy.calls == [8, 8, 7]
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


# ---- fetching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_tensor_datasets_are_indexed_through_subsets(workers: int) -> None:
    dataset = Subset(Subset(numbers(30), range(10, 30)), [0, 5, -1, 7, 8])
    loader = Loader(dataset, batch_size=2, shuffle=False, workers=workers)
    got = [i for b in loader.epoch(0) for i in b.parts[0].inputs.tolist()]
    assert got == [10, 15, 29, 17, 18]
    assert order_of(loader) == [0, 1, 2, 3, 4]
    loader.close()


def test_a_tensor_dataset_of_another_number_of_tensors_is_refused() -> None:
    with pytest.raises(
        JobError,
        match=r"eval_data: its TensorDataset has 3 tensors, \(inputs, targets\) is expected",
    ):
        Loader(TensorDataset(*[torch.ones(2)] * 3), batch_size=2, evaluation=True)


def test_a_persons_collate_is_used_for_tensor_datasets_too() -> None:
    loader = Loader(
        numbers(4),
        batch_size=2,
        shuffle=False,
        collate=lambda samples: ({"x": torch.stack([s[0] for s in samples])}, len(samples)),
    )
    assert [(b.parts[0].inputs["x"].tolist(), b.parts[0].targets) for b in loader.epoch(0)] == [
        ([0, 1], 2),
        ([2, 3], 2),
    ]


def test_tuples_in_a_sample_stay_tuples_in_the_batch() -> None:
    samples = [((torch.ones(2), {"k": (1, 2)}), [3.0, (4, 5)])] * 3
    inputs, targets = next(Loader(samples, batch_size=3, workers=0).epoch(0))
    assert type(inputs) is tuple and inputs[0].shape == (3, 2) and type(inputs[1]["k"]) is tuple
    assert (
        type(targets) is list and type(targets[1]) is tuple and targets[1][1].tolist() == [5, 5, 5]
    )


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (
            (1, 2, 3),
            r"tuple\(int, int, int\), \(inputs, targets\) is expected; for several .* \(\(a, b\), targets\).*",
        ),
        (
            torch.ones(2),
            r"float32\(2,\), \(inputs, targets\) is expected; combine tensors of inputs .*",
        ),
        (None, r"None, \(inputs, targets\) is expected"),
        (
            {"x": 1, "y": 2},
            r"dict\(x=int, y=int\), \(inputs, targets\) is expected; return a pair from .* a collate: .*",
        ),
    ],
)
def test_what_is_no_pair_is_said(sample: Any, said: str) -> None:
    with pytest.raises(JobError, match=rf"^train_data: a sample is {said}$"):
        list(Loader([sample] * 3, batch_size=2, workers=0).epoch(0))


def test_a_collate_that_fails_is_said() -> None:
    ragged = [(torch.ones(i + 1), 0) for i in range(3)]
    with pytest.raises(
        JobError, match=r"^collate: samples can't be batched \(RuntimeError: .*give a collate"
    ):
        list(Loader(ragged, batch_size=3, workers=0).epoch(0))
    with pytest.raises(
        JobError,
        match=r"^collate: it gave tuple\(tuple\(float32\(1,\), int\), .*\), \(inputs, targets\) is expected",
    ):
        list(Loader(ragged, batch_size=3, workers=0, collate=tuple).epoch(0))
    with pytest.raises(JobError, match=r"^collate: it raised ZeroDivisionError"):
        list(Loader(ragged, batch_size=3, workers=0, collate=lambda s: 1 / 0).epoch(0))


class Broken(Noisy):
    def __getitem__(self, i: int) -> Any:
        if i == 13:
            raise ValueError("no such picture\nreally")
        return i, i


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    loader = Loader(Subset(Broken(), [13, 1, 2]), batch_size=3, workers=workers)
    with pytest.raises(
        SampleError,
        match=r"^train_data: sample 0 raised ValueError: no such picture \(test_loader.py, line \d+\)$",
    ) as caught:
        list(loader.epoch(0))
    assert "no such picture" in str(caught.value.__cause__)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SampleError and str(copy) == str(caught.value)
    loader.close()


def test_a_batch_that_raises_names_its_samples() -> None:
    class All(Broken):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise OSError("gone")

    with pytest.raises(SampleError, match=r"fetching samples 0, 1, 2, \.\.\. raised OSError: gone"):
        list(Loader(All(), batch_size=4, shuffle=False, workers=0).epoch(0))


def test_a_batch_that_raises_names_its_sample() -> None:
    class All(Broken):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    with pytest.raises(SampleError, match="train_data: sample 13 raised ValueError: no such"):
        list(Loader(All(), batch_size=4, shuffle=False, workers=0).epoch(0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 0}, "batch_size: 0"),
        ({"batch_size": 2.5}, "batch_size: 2.5"),
        ({"batch_size": 2, "accumulate": 0}, "accumulate: 0"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank: 2 is not one of 2"),
    ],
)
def test_settings_that_cant_be_are_named(settings: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        Loader(numbers(4), **settings)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(JobError, match="train_data: it is empty"):
        Loader([], batch_size=2)


# ---- loader workers ------------------------------------------------------------------------------


def test_workers_take_the_cores_that_ranks_leave() -> None:
    listed = [(0, 0)]
    assert [default_workers(c, 1, listed) for c in (1, 2, 3, 4, 64)] == [0, 1, 2, 2, 2]
    assert [default_workers(c, 4, listed) for c in (2, 4, 7, 8, 12, 64)] == [0, 0, 0, 1, 2, 2]
    assert default_workers(64, 1, Subset(numbers(3), [1])) == 0


def test_ranks_on_accelerators_take_more_workers() -> None:
    listed = [(0, 0)]
    assert [default_workers(c, 1, listed, on_accelerator=True) for c in (1, 2, 4, 16, 64)] == [
        0,
        1,
        3,
        8,
        8,
    ]
    assert [default_workers(c, 8, listed, on_accelerator=True) for c in (8, 16, 64, 128)] == [
        0,
        1,
        7,
        8,
    ]
    assert default_workers(64, 1, numbers(3), on_accelerator=True) == 0


def test_workers_are_shared_out_among_the_ranks_of_a_machine_but_not_where_the_launcher_has_bound_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_workers, "free_cores", lambda: tuple(range(16)))
    monkeypatch.setattr(loader_workers, "bound_by_launcher", lambda cores: False)
    four = World(rank=5, size=8, devices=(Device("cuda", 1),), local_rank=1, local_size=4)
    listed = [(0, 0)]
    assert workers_here(listed, four, on_accelerator=True) == 3
    assert workers_here(listed, None, readers=4, on_accelerator=True) == 3, (
        "one process reads for four cards"
    )
    monkeypatch.setattr(loader_workers, "bound_by_launcher", lambda cores: True)
    assert workers_here(listed, four, on_accelerator=True) == 8, "the 16 are this rank's"


def test_workers_are_kept_over_epochs_and_end_when_closed() -> None:
    class Told(Noisy):
        def __getitem__(self, i: int) -> Any:
            return os.getpid(), threading.active_count()

    loader = Loader(Told(), batch_size=5, workers=1)
    pids = {int(p) for e in (0, 1) for b in loader.epoch(e) for p in b.parts[0].inputs}
    assert len(pids) == 1 and os.getpid() not in pids
    next(loader.epoch(2))  # left in the middle
    assert len(list(loader.epoch(3))) == 5
    loader.close()
    assert gone(pids.pop())
    with pytest.raises(JobError, match="closed"):
        list(loader.epoch(0))


def gone(pid: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_workers_die_with_a_parent_that_is_killed() -> None:
    program = """
        import os, time
        from lockstep.data import Loader
        class Told:
            def __len__(self): return 4
            def __getitem__(self, i): return os.getpid(), i
        loader = Loader(Told(), batch_size=1, workers=2)
        pids = {int(b.parts[0].inputs) for b in loader.epoch(0)}
        print(*pids, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid, 2.0) for pid in pids)


# ---- where the dataset comes from ----------------------------------------------------------------


def test_a_dataset_is_taken_as_it_is_and_a_callable_is_called() -> None:
    dataset = numbers(3)
    assert resolve(dataset, World()) is dataset
    assert resolve(lambda: dataset, World()) is dataset
    assert isinstance(resolve(Noisy, World()), Noisy)
    assert resolve([(1, 2)], World()) == [(1, 2)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "eval_data: it is empty"),
        (list, "eval_data: it is empty"),
        (5, "int is no dataset"),
        (lambda: None, "NoneType is no dataset"),
        (lambda: 1 / 0, "calling it raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_dataset_is_said(source: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        resolve(source, World(), "eval_data")


def test_what_a_callable_says_as_a_job_error_is_said_as_it_stands() -> None:
    def missing() -> Any:
        raise JobError("data: there are no images in here: get them there")

    with pytest.raises(JobError, match=r"^data: there are no images in here: get them there$"):
        resolve(missing, World(), "eval_data")


class ThreadWorld(World):
    """Ranks on threads, for what only talks through ``gather_objects``."""

    def gather_objects(self, value: Any) -> list[Any]:
        self.meeting[0].wait(10)
        self.meeting[1][self.rank] = value
        self.meeting[0].wait(10)
        return list(self.meeting[1])


def on_ranks(size: int, local_size: int, function: Callable[[World], Any]) -> list[Any]:
    meeting = (threading.Barrier(size), [None] * size)
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        world = ThreadWorld(
            rank=rank, size=size, local_rank=rank % local_size, local_size=local_size
        )
        world.meeting = meeting  # type: ignore[attr-defined]
        try:
            results[rank] = function(world)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_first_rank_of_each_node_goes_first() -> None:
    calls: list[int] = []

    def give(rank: int) -> Any:
        if rank in (0, 2):
            time.sleep(0.1)
        calls.append(rank)
        return [(rank, 0)]

    results = on_ranks(4, 2, lambda world: resolve(lambda: give(world.rank), world))
    assert results == [[(r, 0)] for r in range(4)]
    assert set(calls[:2]) == {0, 2} and set(calls[2:]) == {1, 3}


def test_no_rank_waits_for_a_first_one_that_failed() -> None:
    calls: list[int] = []

    def give(rank: int) -> Any:
        calls.append(rank)
        raise OSError("no network")

    results = on_ranks(3, 3, lambda world: resolve(lambda: give(world.rank), world))
    said = "train_data: calling it on rank 0 raised OSError: no network (test_loader.py, line "
    assert all(str(r).startswith(said) for r in results)
    assert all(isinstance(r, JobError) for r in results) and calls == [0]
    assert isinstance(results[0].__cause__, OSError)


# ---- a loop of one's own, and accelerators -------------------------------------------------------


def test_each_pass_over_batches_is_the_next_epoch() -> None:
    loader = batches(numbers(9), batch_size=4, seed=2)
    passes = [[i for inputs, _ in loader for i in inputs.tolist()] for _ in range(2)]
    assert passes == [permutation(9, 2, 0).tolist(), permutation(9, 2, 1).tolist()]


def test_batches_know_the_rank() -> None:
    from lockstep.launch.devices import slots

    before = world_module.enter(World(rank=1, size=2, devices=slots(1)))
    try:
        sizes = [batch.parts[0].size for batch in batches(numbers(9), batch_size=4)]
    finally:
        world_module.enter(before)
    assert sizes == [2, 2, 0]


@pytest.mark.parametrize("dataset", [numbers(9), [({"x": torch.ones(2)}, i) for i in range(9)]])
def test_batches_move_to_an_accelerator_and_empty_shares_with_them(dataset: Any) -> None:
    loader = Loader(
        dataset, batch_size=8, rank=1, world_size=2, workers=0, device=torch.device("meta")
    )
    full, last = loader.epoch(0)
    inputs, targets = full
    assert {
        t.device.type for t in (inputs["x"] if isinstance(inputs, dict) else inputs, targets)
    } == {"meta"}
    assert last.parts[0].inputs is None and full.samples is not None and full.samples.is_cpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["tensors", "samples", "workers"])
def test_batches_copied_ahead_are_the_same(kind: str) -> None:
    inputs, targets = torch.randn(500, 3, 64, 64), torch.arange(500)
    whole = TensorDataset(inputs, targets)
    dataset = whole if kind == "tensors" else [whole[i] for i in range(500)]
    loader = Loader(
        dataset,
        batch_size=32,
        device=torch.device("cuda", 0),
        workers=1 if kind == "workers" else 0,
    )
    seen: list[int] = []
    for x, y in loader.epoch(0):
        assert x.is_cuda and y.is_cuda
        torch.cuda._sleep(1_000_000)
        assert torch.equal(x.cpu(), inputs[y.cpu()])
        seen += y.tolist()
        del x, y
    assert sorted(seen) == list(range(500))
    loader.close()


class ByEpoch(torch.utils.data.Dataset[Any]):
    """Its samples follow the epoch that it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(10 * self.epoch + index)), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_told_its_epoch(workers: int) -> None:
    """Found by trial: only streams were."""
    loader = lockstep.batches(ByEpoch(), batch_size=5, workers=workers)
    for epoch in range(3):
        for inputs, index in loader:
            assert torch.equal(inputs[:, 0], 10.0 * epoch + index)
