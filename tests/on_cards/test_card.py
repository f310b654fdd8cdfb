"""The simulated card itself: it does what its other tests rely on."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from simulated_card import counts

card = torch.ops.simulated_card
ONE, TWO = torch.device("card:0"), torch.device("card:1")


def test_operands_on_two_cards_or_on_a_card_and_the_cpu_raise() -> None:
    x = torch.ones(3, device=ONE)
    for other in (torch.ones(3, device=TWO), torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
    torch.testing.assert_close((x + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))  # a number


def test_memory_is_counted_for_each_card() -> None:
    before = [torch.accelerator.memory_allocated(i) for i in (0, 1)]
    x = torch.ones(1000, device=TWO)
    torch.accelerator.reset_peak_memory_stats(1)
    y = x + 1
    held = torch.accelerator.memory_allocated(1)
    assert held - before[1] == 8000
    del x, y
    assert [torch.accelerator.memory_allocated(i) for i in (0, 1)] == before
    assert torch.accelerator.max_memory_allocated(1) == held


def test_a_copy_that_is_not_waited_for_has_not_happened() -> None:
    x = torch.ones(4, device=ONE)
    here = torch.zeros(4, pin_memory=True)
    here.copy_(x, non_blocking=True)
    assert here.sum() == 0
    torch.accelerator.synchronize(0)
    assert here.sum() == 4

    side = torch.Stream(ONE)
    there = torch.zeros(4, device=ONE)
    with side:
        there.copy_(here, non_blocking=True)
    assert there.sum() == 0  # read on the card's own stream
    torch.accelerator.current_stream(ONE).wait_stream(side)
    assert there.sum() == 4


def test_a_copy_between_cards_on_streams_of_its_own_happens_when_it_is_waited_for() -> None:
    x, out, into = torch.ones(4, device=ONE), torch.Stream(ONE), torch.Stream(TWO)
    with out, into:
        y = x.to(TWO)
    assert not (y == 1).any()
    x.mul_(2)  # should have waited for it
    torch.accelerator.current_stream(TWO).wait_stream(into)
    assert y.sum() == 8


def test_what_the_host_does_is_counted() -> None:
    x = torch.ones(4, device=ONE)
    before = counts("host_reads", "waits", "blocking_copies", "crossings")
    float(x.sum()), x.cpu(), x.to(TWO), torch.accelerator.synchronize(0)
    after = counts("host_reads", "waits", "blocking_copies", "crossings")
    assert {name: after[name] - before[name] for name in after} == dict.fromkeys(after, 1)


def test_each_card_has_a_generator_and_a_thread_of_autograd() -> None:
    torch.manual_seed(3)
    one, two, again = (torch.rand(5, device=place).cpu() for place in (ONE, TWO, ONE))
    assert torch.equal(one, two) and not torch.equal(one, again)
    threads = set()
    with torch.autograd.set_multithreading_enabled(True):
        for place in (ONE, TWO):
            x = torch.ones(2, device=place, requires_grad=True)
            x.register_hook(lambda gradient: threads.add(threading.get_ident()))
            x.exp().sum().backward()
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_two_cards_work_at_the_same_time_and_a_copy_between_them_holds_both() -> None:
    card.set_cost("aten::mm", 1.0)
    try:
        card.reset_clocks()
        x, y = torch.ones(2, 2, device=ONE), torch.ones(2, 2, device=TWO)
        for _ in range(3):
            x, y = x @ x, y @ y
        assert [card.clock_of(i) for i in (0, 1, -1)] == [3.0, 3.0, 0.0]
        x @ x
        y.to(ONE)
        y @ y
        assert [card.clock_of(i) for i in (0, 1)] == [4.0, 5.0]
        float(y.sum())
        assert card.clock_of(-1) == 5.0
        x @ x
        assert card.clock_of(0) == 6.0
    finally:
        card.set_cost("aten::mm", 0.0)


def test_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)
    )
    x, y = torch.randn(6, 2, 5, 5), torch.randint(3, (6,))
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to(ONE)
    nn.functional.cross_entropy(model(x.to(ONE)), y.to(ONE)).backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.cpu(), gradient)
