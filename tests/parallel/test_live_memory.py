"""Live bytes: what tensors were alive at once, and in whose thread they were made."""

from __future__ import annotations

import torch

from benchmarks.live_memory import LiveBytes
from lockstep.launch.devices import slots
from lockstep.parallel import parallel_apply

KB = 1024


def test_the_peak_is_of_what_was_alive_at_once() -> None:
    kept = torch.zeros(KB)  # was there before
    with LiveBytes() as live:
        for _ in range(5):
            torch.ones(100 * KB, dtype=torch.uint8)
        one = torch.ones(30 * KB, dtype=torch.uint8)
        view = one[1:].view(-1)
        one += 1
        kept.add_(1)
        del one
        two = torch.ones(60 * KB, dtype=torch.uint8)
    assert live.peak() == live.peak("cpu") == 100 * KB
    del view, two
    with LiveBytes() as live:
        one = torch.ones(30 * KB, dtype=torch.uint8)
        view = one[1:]
        del one
        two = torch.ones(60 * KB, dtype=torch.uint8)
        del view
        three = torch.ones(5 * KB, dtype=torch.uint8)
    assert live.peak() == 90 * KB
    assert len(two) + len(three) == 65 * KB


def test_what_backward_makes_is_counted() -> None:
    x = torch.ones(KB, requires_grad=True)
    with LiveBytes() as live:
        x.exp().sum().backward()
    assert live.peak() >= 8 * KB


def test_a_slot_owns_what_its_thread_makes() -> None:
    def make(size: int) -> torch.Tensor:
        with torch.inference_mode():
            torch.zeros(size, dtype=torch.uint8)
        return torch.zeros(size, dtype=torch.uint8)

    places = slots(2)
    with LiveBytes() as live:
        found = parallel_apply([make, make], [KB, 3 * KB], devices=places)
        here = torch.zeros(7 * KB, dtype=torch.uint8)
    assert (live.peak(places[0]), live.peak("cpu:1"), live.peak("cpu")) == (KB, 3 * KB, 7 * KB)
    assert live.peak() == 11 * KB == len(here) + sum(map(len, found))
    parallel_apply([make], [KB], devices=places[:1])
    assert live.peak() == 11 * KB, "it has ended"


def test_what_the_caller_makes_can_be_the_first_slot_s() -> None:
    places = slots(2)
    with LiveBytes(caller=places[0]) as live:
        found = parallel_apply([torch.zeros, torch.zeros], [KB, KB], devices=places)
        here = torch.zeros(KB)
    assert live.peak("cpu") == 0
    assert (live.peak(places[0]), live.peak(places[1])) == (8 * KB, 4 * KB)
    assert len(found) == 2 and len(here) == KB
