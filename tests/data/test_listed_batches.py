"""Batches of one's own: global batches that a function lists, and cuts by cost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

import lockstep

from harness import parity  # isort: skip
from lockstep import Job, train
from lockstep.data import Loader, order
from lockstep.data.costs import costs_of
from lockstep.errors import JobError, RunError
from lockstep.tensors.rows import share_sizes, sizes_by_cost
from lockstep.training.records.audit import added_up

BOUND = 1e-10
SAMPLES = 31
LENGTHS = [1 + (7 * i) % 12 for i in range(SAMPLES)]
SIZES = [9, 1, 5, 2, 7, 1, 6]
"""Batches of 1 sample leave ranks and micro-batches without any."""


class Texts(torch.utils.data.Dataset[Any]):
    """Texts of 1 to 12 words."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.arange(LENGTHS[index]) * (index + 1) % 11
        return words, (words * 3 + 1) % 11


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, following = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(list(words), batch_first=True), pad(list(following), True, padding_value=-100)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    def forward(self, words: Tensor) -> Tensor:
        return self.body(words)


def loss(logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    return total, (following != -100).sum()


def listed(epoch: int) -> list[Tensor]:
    return list(torch.randperm(SAMPLES).split(SIZES))


def drawn(epoch: int) -> Iterator[list[int]]:
    for size in SIZES:
        yield torch.randint(SAMPLES, (size,)).tolist()


FUNCTIONS: dict[str, Callable[[int], Iterable[Any]]] = {"list": listed, "generator": drawn}


def job_of(batches: Any = listed, **settings: Any) -> Job:
    return Job(
        model=Words,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train_data=Texts(),
        eval_data=Texts(),
        collate=padded,
        batches=batches,
        batch_size=8,
        **{"epochs": 2, "loader_workers": 0, **settings},
    )


# ---- the numbers of one device -------------------------------------------------------------------


BY_COST = {"cut_by": LENGTHS}
WAYS: list[Any] = [
    ("ddp", "2xcpu", "list", {}),
    ("ddp", "3xcpu", "generator", {**BY_COST, "accumulate": 2}),
    ("dp", "2xcpu", "generator", {"cut_by": LENGTHS.__getitem__}),
    ("fsdp", "2xcpu", "list", BY_COST),
    pytest.param("ddp", "2xcpu", "generator", {"loader_workers": 1}, marks=pytest.mark.slow),
    pytest.param("ddp", "3xcpu", "list", BY_COST, marks=pytest.mark.slow),
    pytest.param("dp", "2xcpu", "list", {"accumulate": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", "2xcpu", "generator", {"accumulate": 2}, marks=pytest.mark.slow),
    pytest.param("ddp=2xpp=2", "4xcpu", "list", BY_COST, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "devices", "function", "settings"), WAYS)
def test_batches_of_ones_own_have_the_numbers_of_one_device(
    strategy: str, devices: str, function: str, settings: dict[str, Any]
) -> None:
    job = job_of(FUNCTIONS[function], **settings)
    found = parity(job, strategy, devices, against_settings={"cut_by": None})
    assert found.within(BOUND), str(found)


@pytest.mark.parametrize("settings", [{}, BY_COST])
def test_micro_batches_of_pp_are_parts_of_batches_of_ones_own(settings: dict[str, Any]) -> None:
    found = parity(job_of(**settings), "pp", "2xcpu", against_settings={"accumulate": 2})
    assert found.within(BOUND), str(found)


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.tanh()
    return (outputs.T @ outputs / len(outputs)).square().mean() - outputs.std(
        0, correction=0
    ).mean()


def weighted(outputs: Tensor, kinds: Tensor, counts: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, kinds, reduction="sum") / counts["kinds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": spread, "loss_over": "batch"},
        {"loss": weighted, "counts": lambda kinds: {"kinds": (kinds + 1).sum()}},
    ],
)
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", "3xcpu"), ("dp", "2xcpu")])
def test_losses_over_the_batch_and_counts_are_right_with_batches_of_ones_own(
    strategy: str, devices: str, settings: dict[str, Any]
) -> None:
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)
    fields: dict[str, Any] = {"train_data": data, "eval_data": data, "collate": None, **BY_COST}
    job = job_of().replace(model=lambda: nn.Linear(4, 3), **fields, **settings)
    found = parity(job, strategy, devices)
    assert found.within(BOUND), str(found)


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_batch_norm_is_synchronized_over_the_ranks_that_have_samples() -> None:
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3)
    job = job_of().replace(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        loss=nn.CrossEntropyLoss(),
        train_data=data,
        eval_data=data,
        collate=None,
        sync_batchnorm=True,
        batches=lambda epoch: torch.randperm(SAMPLES).split([9, 2, 3, 8, 2, 7]),
    )
    found = parity(job, "ddp", "3xcpu")
    assert found.within(BOUND), str(found)


# ---- the loader ----------------------------------------------------------------------------------


def numbers(n: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n))


def loader_of(batches: Any, **settings: Any) -> Loader:
    return Loader(numbers(), batches=batches, batch_size=8, **settings)


def samples_of(loader: Loader, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.samples.tolist() for batch in loader.epoch(epoch, start)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_batches_are_drawn_from_the_epoch_and_move_no_other_generator(function: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = loader_of(FUNCTIONS[function], seed=3)
    first = samples_of(loader)
    assert [len(batch) for batch in first] == SIZES
    assert torch.equal(before, torch.get_rng_state())
    other = loader_of(FUNCTIONS[function], seed=3, rank=1, world_size=2, workers=1)
    iterator = other.epoch(0)
    again = []
    for batch in iterator:
        torch.rand(7)
        again.append(batch.samples.tolist())
    other.close()
    assert again == first != samples_of(loader, 1)
    for start in (0, 3, len(SIZES)):
        assert samples_of(loader, 0, start) == first[start:]


def test_what_has_a_length_is_counted() -> None:
    for batches in (listed, lambda epoch: torch.arange(30).view(6, 5)):
        loader = loader_of(batches)
        assert loader.batches_of(0) == loader.batches_of(1) == len(loader) == len(batches(0))
    sampler = BatchSampler(RandomSampler(numbers()), 4, drop_last=False)
    loader = loader_of(lambda epoch: sampler)
    assert loader.batches_of(0) == 8 and loader.samples == SAMPLES
    growing = loader_of(lambda epoch: [[0]] * (epoch + 2))
    assert [growing.batches_of(epoch) for epoch in (0, 1, 0)] == [2, 3, 2]
    loader = loader_of(drawn)
    assert loader.batches_of(0) == len(list(loader)) == len(SIZES)
    assert loader.samples == sum(SIZES)


def test_batches_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MOST", 100)
    with pytest.raises(JobError, match="for epoch 0 it gave more than 100 batches: let it end"):
        loader_of(lambda epoch: itertools.repeat([0]))


def fails(epoch: int) -> Iterator[list[int]]:
    yield [1]
    raise OSError("no list")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([[0], []], r"batches: as batch 1 of epoch 0 it gave \(0,\), a list of indices"),
        ([[0, SAMPLES]], f"it gave index {SAMPLES}, the dataset has 0 to {SAMPLES - 1}"),
        ([[0.5]], "batches: as batch 0 of epoch 0 it gave torch.float32, whole numbers"),
        ([1, 2], r"it gave \(\), a list of indices is expected"),
        ([["a"]], "it gave a list, a list of indices"),
        ([], "batches: for epoch 0 it gave no batch"),
        (iter(()), "batches: for epoch 0 it gave no batch"),
        (None, "batches: for epoch 0 it raised TypeError"),
        (fails(0), "batches: for epoch 0 it raised OSError: no list"),
    ],
)
def test_lists_that_cant_be_are_refused(given: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        samples_of(loader_of(lambda epoch: given))


def test_a_run_that_was_further_than_its_batches_is_refused() -> None:
    with pytest.raises(RunError, match="gave 7 batches, but the run had used 8"):
        samples_of(loader_of(drawn), 0, 8)


def test_what_does_not_go_with_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="order: batches gives the order"):
        job_of(order=lambda epoch: [0])
    with pytest.raises(JobError, match=r"batches: a function is expected, not list"):
        job_of([[0, 1]])
    settings: dict[str, Any] = {"folder": tmp_path, "quiet": True}
    for field, value in (("batches", listed), ("cut_by", LENGTHS)):
        job = job_of(None).replace(train_data=lambda: iter(Texts()), **{field: value})
        with pytest.raises(JobError, match=f"{field}: train_data is a stream"):
            train(job, **settings)
    train(job_of(drawn, eval_every="0.5 epochs", epochs=1), **settings)


def differ(world: lockstep.World, of: str) -> list[list[int]]:
    def batches(epoch: int) -> Iterable[list[int]]:
        other = world.rank if of != "cut_by" else 0
        lists = [[i] for i in range(20)] + [[other]]
        if of == "longer":
            lists = [[i] for i in range(16 + other)]
        return lists if of == "list" else (batch for batch in lists)

    loader = lockstep.batches(
        numbers(), 8, batches=batches, cut_by=lambda i: 1 + world.rank if of == "cut_by" else 1
    )
    return [batch.samples.tolist() for batch in loader]


@pytest.mark.parametrize("of", ["list", "generator", "longer", "cut_by"])
def test_batches_that_differ_between_ranks_are_refused(of: str) -> None:
    with pytest.raises(JobError, match="on rank 1 differ from those on rank 0"):
        lockstep.launch(differ, devices="2xcpu", args=(of,))


# ---- the cut by cost -----------------------------------------------------------------------------


def test_parts_are_of_like_cost() -> None:
    assert sizes_by_cost([1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1]) == [4, 2, 2]
    assert sizes_by_cost([8, 1, 1, 1], [1, 1]) == [1, 3]
    assert sizes_by_cost([1, 1, 1, 8], [1, 1, 1]) == [2, 1, 1]
    assert sizes_by_cost([1] * 8, [3, 1]) == [6, 2]
    for items in range(12):
        for parts in range(1, 5):
            for costs in ([1.0] * items, [0.0] * items, [2.0**i for i in range(items)]):
                sizes = sizes_by_cost(costs, [1] * parts)
                assert sum(sizes) == items and len(sizes) == parts
                assert sizes.count(0) == max(0, parts - items)
                assert sorted(sizes, key=bool, reverse=True) == sizes, "empty parts are the last"
            even = sizes_by_cost([1] * items, [1] * parts)
            assert sorted(even, reverse=True) == share_sizes(items, parts)


@pytest.mark.parametrize("batches", [None, listed])
def test_local_batches_are_cut_by_cost_in_the_order_of_the_batch(batches: Any) -> None:
    settings: dict[str, Any] = {"batch_size": 12, "world_size": 3, "accumulate": 2}
    *ranks, of_all = [
        Loader(numbers(), batches=batches, cut_by=LENGTHS, rank=rank, workers=0, **settings)
        for rank in (0, 1, 2, None)
    ]
    for first, *others, every in zip(*(r.epoch(1) for r in ranks), of_all.epoch(1), strict=True):
        shares = [batch.parts for batch in (first, *others)]
        in_order = [part.samples for parts in zip(*shares, strict=True) for part in parts]
        assert torch.equal(torch.cat(in_order), first.samples)
        for mine, theirs in zip(shares, every.shares, strict=True):
            assert [p.samples.tolist() for p in mine] == [p.samples.tolist() for p in theirs]
            assert [p.of for p in mine] == [p.of for p in theirs] == [p.of for p in shares[0]]
        for part in zip(*shares, strict=True):
            costs = [sum(LENGTHS[i] for i in p.samples.tolist()) for p in part]
            if all(p.size > 1 for p in part):
                assert max(costs) - min(costs) <= 2 * max(LENGTHS)


@pytest.mark.parametrize(
    ("cut_by", "said"),
    [
        ([1, 2], rf"cut_by: costs of shape \(2,\) were given, \({SAMPLES},\) is expected"),
        ([1.0] * 30 + [-1.0], "cut_by: a cost is -1.0, a number from 0"),
        (lambda index: float("nan"), "cut_by: a cost is nan"),
        (lambda index: "long", "cut_by: for sample 0 it raised ValueError"),
        ("long", "cut_by: reading the costs raised"),
    ],
)
def test_costs_that_cant_be_are_refused(cut_by: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        costs_of(cut_by, SAMPLES)(torch.arange(2))


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["generator", pytest.param("list", marks=pytest.mark.slow)])
def test_a_run_is_resumed_within_an_epoch_of_its_own_batches(
    function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(FUNCTIONS[function], **BY_COST)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": "2xcpu", "folder": tmp_path}
    whole = train(job, quiet=True, **settings)
    capsys.readouterr()
    run = train(job, steps=10, audit=True, **settings)
    assert "batches as the job lists them over 2 devices, by cost" in capsys.readouterr().out
    run = train(job, resume=run.folder, steps=14, quiet=True, **settings)
    assert (whole.folder / "model.safetensors").read_bytes() == (
        run.folder / "model.safetensors"
    ).read_bytes()

    lines, is_right = added_up(run.folder)
    assert is_right and lines[0] == "2 starts, 14 steps"
    once = ", each once" if function == "list" else ""
    assert lines[1:] == [
        f"epoch {epoch}: 31 samples, in the job's own order{once}" for epoch in (1, 2)
    ]
    written = re.findall(
        r"\[10, 1, 2, \[([^]]*)\]\]",
        "".join(path.read_text() for path in sorted((run.folder / "audit").iterdir())),
    )
    used = [int(i) for part in written for i in part.split(", ")]
    loader = Loader(Texts(), batches=FUNCTIONS[function], batch_size=8, collate=padded)
    assert used == samples_of(loader, 1)[2]

    other = train(job, quiet=True, folder=tmp_path, steps=10)
    other = train(job, quiet=True, resume=other.folder, strategy="dp", devices="3xcpu", steps=14)
    assert other.history[-1]["train_loss"] == pytest.approx(whole.history[-1]["train_loss"], 1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_verify_finds_batches_of_ones_own_right(function: str) -> None:
    answer = lockstep.verify(job_of(FUNCTIONS[function], **BY_COST), strategy="ddp", devices=2)
    assert answer.equal, str(answer)


def test_ranks_that_do_not_wait_use_each_sample_once(tmp_path: Path) -> None:
    run = train(
        job_of(), strategy="hogwild", devices="2xcpu", audit=True, folder=tmp_path, quiet=True
    )
    assert added_up(run.folder)[0][1].endswith("in the job's own order, each once")
