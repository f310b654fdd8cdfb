"""Level devices: the fullest device of each way to train a classifier whose output layer is
large.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from benchmarks.device_load import Level, busy_seconds, covered, level_of
from benchmarks.largest_batch import largest_batch
from lockstep.errors import InputError, OutOfMemory
from lockstep.launch.devices import slots
from lockstep.parallel import (
    Balanced,
    DataParallel,
    ParallelLoss,
    parallel_apply,
)

BATCH, WIDTH, CLASSES = 64, 64, 2000
TWO = slots(2)
Way = Callable[
    [nn.Sequential, torch.optim.Optimizer], Callable[[torch.Tensor, torch.Tensor], object]
]


def gathered(
    model: nn.Sequential, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    net, criterion = DataParallel(model, TWO), nn.CrossEntropyLoss()
    return updating(optimizer, lambda inputs, labels: criterion(net(inputs), labels))


def balanced(
    model: nn.Sequential, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    net, loss_of = (
        DataParallel(model, TWO, balanced=True),
        ParallelLoss(None, nn.CrossEntropyLoss(), TWO),
    )
    return updating(optimizer, lambda inputs, labels: loss_of(net(inputs), labels).loss)


def chunked(
    model: nn.Sequential, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    net = DataParallel(model[0], TWO, balanced=True)
    loss_of = ParallelLoss(model[1], nn.CrossEntropyLoss(), TWO, chunk_size=8)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = net(inputs)
        rows = Balanced(
            [share.unsqueeze(0) for share in hidden], hidden.devices
        )  # samples in the place of time
        return loss_of(rows, labels.view(len(hidden), -1)).loss

    return updating(optimizer, loss)


def by_dp(
    model: nn.Sequential, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    # (The sum check of the first update computes on the first device.)
    return lockstep.parallelize(
        model, nn.CrossEntropyLoss(), optimizer, strategy="dp", devices="2xcpu", check_every=0
    )


def updating(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(inputs, labels).backward()
        optimizer.step()

    return step


def stepping(way: Way) -> tuple[nn.Sequential, Callable[[int], object]]:
    """A model, and its step on a batch of so many samples."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU()), nn.Linear(WIDTH, CLASSES)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8)
    step = way(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def on(batch: int) -> object:
        drawn = torch.Generator().manual_seed(batch)
        inputs = torch.randn(batch, 32, generator=drawn, dtype=torch.float64)
        return step(inputs, torch.randint(CLASSES, (batch,), generator=drawn))

    return model, on


@pytest.mark.parametrize("way", [balanced, chunked, by_dp])
def test_outputs_and_losses_that_stay_leave_the_slots_level(way: Way) -> None:
    _, step = stepping(way)
    level = level_of(lambda: step(BATCH), "2xcpu", repeat=1)
    assert list(level.bytes) == list(level.seconds) == ["cpu:0", "cpu:1"]
    assert level.fullest < 1.1
    assert all(seconds > 0 for seconds in level.seconds.values())


def test_gathered_outputs_make_the_first_slot_the_fullest() -> None:
    _, step = stepping(gathered)
    level = level_of(lambda: step(BATCH), "2xcpu", repeat=1)
    assert level.bytes["cpu:0"] > 2 * level.bytes["cpu:1"]
    assert level.fullest > 1.4


def test_all_ways_make_the_same_updates() -> None:
    models = []
    for way in (gathered, balanced, chunked, by_dp):
        model, step = stepping(way)
        for batch in (32, 16):
            step(batch)
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for found in models[1:]:
        assert (found - models[0]).abs().max() < 1e-12


def test_level_outputs_let_a_larger_batch_fit() -> None:
    weights = WIDTH * CLASSES * 8
    found = {}
    for way, limit in ((gathered, 64), (balanced, 128), (chunked, 128), (by_dp, 128)):
        _, step = stepping(way)
        found[way] = largest_batch(step, TWO, budget=3 * weights, multiple=16, limit=limit)
    assert 0 < found[gathered] < 64
    assert found[balanced] >= 1.4 * found[gathered]
    assert found[by_dp] >= found[balanced]
    assert found[chunked] == 128, "which may be more still"


def test_the_largest_batch_is_the_last_that_fits() -> None:
    kept = []

    def step(batch: int) -> None:
        def make() -> None:
            kept[:] = [torch.zeros(batch, dtype=torch.uint8)]

        parallel_apply([make], [()], devices=TWO[:1])
        kept.clear()

    for budget, found in ((1, 1), (2, 2), (3, 3), (1000, 1000), (1023, 1023), (1024, 1024)):
        assert largest_batch(step, TWO[:1], budget) == found
    assert largest_batch(step, TWO[:1], 1000, multiple=64) == 960
    assert largest_batch(step, TWO[:1], 63, multiple=64) == 0
    assert largest_batch(step, TWO[:1], 1000, limit=300) == 300


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OutOfMemory])
def test_a_step_that_runs_out_of_memory_does_not_fit(error: type[Exception]) -> None:
    def step(batch: int) -> None:
        if batch > 10:
            raise error("no room")

    assert largest_batch(step, TWO, 1000) == 10
    assert largest_batch(step, TWO, 1000, multiple=11) == 0


def test_busy_is_computing_and_not_waiting() -> None:
    def compute(amount: int) -> None:
        x = torch.ones(300, 300)
        for _ in range(amount):
            x = (x @ x).clamp_(0, 1)

    with busy_seconds() as busy:
        parallel_apply([compute, compute], [5, 200], devices=TWO)
    assert sorted(busy) == ["cpu", "cpu:0", "cpu:1"]
    assert busy["cpu:1"] > 3 * busy["cpu:0"] > 0
    assert busy["cpu"] < busy["cpu:1"]


def test_overlapping_kernels_count_once() -> None:
    assert covered([(5, 7), (0, 2), (1, 4), (2, 3), (9, 9)]) == 6
    assert covered([]) == 0


def test_a_level_is_printed_as_a_table() -> None:
    level = Level({"cpu:0": 30_000_000, "cpu:1": 10_000_000}, {"cpu:0": 1.5, "cpu:1": 0.5})
    assert (level.fullest, level.busiest) == (1.5, 1.5)
    assert str(level).splitlines() == [
        "                 peak     busy",
        "cpu:0         30.0 MB  1.500 s",
        "cpu:1         10.0 MB  0.500 s",
        "most to mean     1.50     1.50",
    ]
    assert Level({"cpu:0": 0}, {"cpu:0": 0.0}).fullest == 1.0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="repeat 0: a step is timed at least once"):
        level_of(lambda: None, "2xcpu", repeat=0)
    with pytest.raises(InputError, match="cpu:0 can't say when it is full: give a budget"):
        largest_batch(lambda batch: None, "2xcpu")
    with pytest.raises(InputError, match="multiple 0, budget 5: both are at least 1"):
        largest_batch(lambda batch: None, "2xcpu", 5, multiple=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_a_card_is_measured_and_fills_up() -> None:
    def step(batch: int) -> None:
        x = torch.randn(batch, 1 << 20, device="cuda")  # 4 MiB a sample
        (x @ x.T).sum()

    level = level_of(lambda: step(16), "cuda:0")
    assert level.bytes["cuda:0"] >= 16 << 22
    assert 0 < level.seconds["cuda:0"] < 1
    assert 50 < largest_batch(step, "cuda:0", 400 << 20) <= 100
