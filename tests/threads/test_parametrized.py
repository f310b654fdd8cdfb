"""Parametrized layers in replicas, inside PyTorch's ``cached()``: each caches its own, with the
plain numbers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import lockstep
from lockstep.parallel import DataParallel, ParallelLoss, data_parallel

EXACT = {"rtol": 1e-12, "atol": 1e-12}


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def nothing_stays_cached() -> Iterator[None]:
    yield
    assert not parametrize._cache_enabled and not parametrize._cache


class Loop(nn.Module):
    """A layer of parametrized weights, used three times."""

    def __init__(self, *, caches: bool = False) -> None:
        super().__init__()
        self.cell = parametrizations.weight_norm(nn.Linear(4, 4))
        self.last = parametrizations.orthogonal(nn.Linear(4, 2))
        self.caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if self.caches else contextlib.nullcontext():
            for _ in range(3):
                x = self.cell(x).tanh()
            return self.last(x)


def gradients(
    net: Any, module: nn.Module, forwards: int, outside: bool
) -> list[torch.Tensor | None]:
    """Of several forwards with one backward after each, or (1 or 2) after all."""
    module.zero_grad()
    torch.manual_seed(3)
    with parametrize.cached() if outside else contextlib.nullcontext():
        sum((net(torch.randn(5, 4)) ** 2).sum() for _ in range(forwards)).backward()  # type: ignore[union-attr]
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("where", ["around", "inside", "around and inside"])
def test_gradients_of_cached_weights_are_those_of_the_plain_module(
    where: str, forwards: int
) -> None:
    plain = Loop(caches="inside" in where)
    module = copy.deepcopy(plain)
    net = DataParallel(module, "2xcpu")
    for _ in range(3):
        expected = gradients(plain, plain, forwards, "around" in where)
        torch.testing.assert_close(
            gradients(net, module, forwards, "around" in where), expected, **EXACT
        )
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)
            mine.data -= 0.1 * mine.grad
            theirs.data -= 0.1 * theirs.grad


def test_what_is_cached_is_computed_once_by_each_replica() -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return weight

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in module:
        parametrize.register_parametrization(layer, "weight", Counted(), unsafe=True)
    calls.clear()
    net = DataParallel(module, "2xcpu")
    with parametrize.cached(), torch.no_grad():
        for _ in range(3):
            net(torch.randn(6, 4))
    assert len(calls) == 4
    net(torch.randn(6, 4))
    assert len(calls) == 8


def test_the_function_that_keeps_no_replicas_may_be_called_in_it_again_and_again() -> None:
    plain = Loop()
    module = copy.deepcopy(plain)
    expected = gradients(plain, plain, 4, outside=True)
    found = gradients(lambda x: data_parallel(module, x, "2xcpu"), module, 4, outside=True)
    torch.testing.assert_close(found, expected, **EXACT)


def test_what_a_parametrization_writes_as_it_is_cached_is_that_of_one_device() -> None:
    plain = parametrizations.spectral_norm(nn.Linear(4, 4))
    module = copy.deepcopy(plain)
    for net in (plain, DataParallel(module, "2xcpu")):
        with parametrize.cached():
            net(torch.ones(4, 4)).sum().backward()
    for mine, theirs in zip(module.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_a_parallel_loss_may_have_a_parametrized_generator() -> None:
    plain = parametrizations.weight_norm(nn.Linear(6, 9))
    generator = copy.deepcopy(plain)
    hidden, targets = torch.randn(4, 7, 6), torch.randint(9, (4, 7))
    F.cross_entropy(plain(hidden).flatten(0, 1), targets.flatten()).backward()
    with parametrize.cached():
        ParallelLoss(generator, nn.CrossEntropyLoss(), "2xcpu", chunk_size=2)(
            hidden, targets
        ).loss.backward()
    torch.testing.assert_close(
        [p.grad for p in generator.parameters()], [p.grad for p in plain.parameters()], **EXACT
    )


def test_the_replicas_of_dp_cache_their_own_too() -> None:
    ends = []
    for strategy, devices in (("single", "1xcpu"), ("dp", "2xcpu")):
        torch.manual_seed(0)
        model = Loop(caches=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.parallelize(
            model, nn.MSELoss(), optimizer, strategy=strategy, devices=devices
        )
        torch.manual_seed(1)
        for _ in range(3):
            step(torch.randn(5, 4), torch.randn(5, 2))
        ends.append(list(step.state_dict()["model"].values()))
    torch.testing.assert_close(*ends, **EXACT)


def test_no_module_is_kept_alive_by_its_replicas_class() -> None:
    module = Loop()
    DataParallel(module, "2xcpu")(torch.randn(4, 4)).sum().backward()
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None
