"""What once was done for the type "cuda" alone is done for every accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.largest_batch import largest_batch
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.writer import Writer
from lockstep.launch.device_table import machine, table
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.model.losses.loss import Totalled
from lockstep.model.losses.loss_check import LossCheck
from lockstep.tensors.pytree import to_device
from lockstep.threads.thread_pool import run
from simulated_card import counts


def test_the_table_of_devices_has_each_cards_memory() -> None:
    lines = table().splitlines()
    assert [line.split()[0] for line in lines[:8]] == [f"card:{i}" for i in range(8)]
    assert all("GiB free)" in line for line in lines[:8])
    assert machine()["accelerators"] == ", ".join(["card"] * 8)


@pytest.mark.slow
def test_the_largest_batch_is_what_a_card_says_it_has_memory_for() -> None:
    def step(batch: int) -> None:
        if batch > 100:
            raise torch.OutOfMemoryError("a card's memory is full")
        torch.ones(batch, device="card").sum()

    assert largest_batch(step, "card:0") == 100


def test_the_largest_batch_within_a_budget_of_a_card() -> None:
    net = nn.Linear(256, 256, bias=False).to("card:0")
    assert (
        100
        <= largest_batch(
            lambda batch: net(torch.ones(batch, 256, device="card:0")), "card:0", 100 * 2048
        )
        <= 101
    )


def test_a_checkpoint_is_copied_from_a_card_without_the_host_waiting(tmp_path) -> None:
    writer = Writer(tmp_path, World(), 2)
    state = {
        "model": {
            "weight": torch.arange(4.0, device="card:1"),
            "bias": torch.ones(2, device="card:0"),
        }
    }
    before = counts("blocking_copies")
    writer.save(1, state, {})
    assert counts("blocking_copies") == before
    writer.finish()
    ((path, index),) = CheckpointFolder(tmp_path).whole(pytest.fail)
    kept = index.state(path)["model"]
    assert kept["weight"].tolist() == [0.0, 1.0, 2.0, 3.0] and kept["bias"].tolist() == [1.0, 1.0]


def test_what_comes_from_a_card_is_there_when_the_host_reads_it() -> None:
    on_card = torch.arange(4.0).to("card:1")
    assert to_device([on_card], torch.device("cpu"))[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_count_of_targets_on_another_card_is_checked_without_the_host_waiting() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (outputs * 2).sum(), targets.ne(0).sum()

    outputs, targets = torch.ones(8, 1, device="card:0"), torch.ones(8, device="card:1")
    made = Totalled(loss)
    check = LossCheck(made, cuts=True)
    check(outputs, targets, made(outputs, targets, 8), 8, step=1)
    assert check.wants(2)


def test_threads_compute_in_the_callers_stream_of_every_card() -> None:
    """A copy from another card waits for the stream of that card that is current in its thread."""
    cards = Device("card", 0), Device("card", 1)

    def streams() -> tuple[int, list[int]]:
        ids = [torch.accelerator.current_stream(card.torch).stream_id for card in cards]
        return torch.accelerator.current_device_index(), ids

    first, second = (torch.Stream(card.torch) for card in cards)
    with second, first:
        ids = [first.stream_id, second.stream_id]
        assert run(cards, [streams, streams]) == [(0, ids), (1, ids)]
    assert run(cards, [streams, streams]) == [(0, [0, 0]), (1, [0, 0])]
