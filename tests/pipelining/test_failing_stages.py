"""A pipeline that fails stops at once, names where, and leaves nothing running."""

from __future__ import annotations

import _thread
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.strategies.pp import PP

from zoo import _job  # isort: skip

MAP = {"first": 0, "second": 1}


class Failing(nn.Module):
    """Calls ``fail`` once, in one place, at the seventh time: in the second update, where
    micro-batches overlap.
    """

    place = ""
    calls = 0
    fail: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.register_forward_pre_hook(lambda module, args: maybe("a hook"))
        self.first.weight.register_hook(lambda gradient: maybe("a hook of a weight"))
        self.second.register_full_backward_hook(lambda module, into, out: maybe("a backward hook"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maybe("before the first layer")
        x = Checking.apply(torch.tanh(self.first(x)))
        maybe("between")
        return self.second(x)


def maybe(place: str) -> None:
    if place == Failing.place:
        Failing.calls += 1
        if Failing.calls == 7:
            Failing.fail()


class Checking(torch.autograd.Function):
    """Its backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        maybe("a function's backward")
        return gradient


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    if torch.is_grad_enabled():  # else it is checked
        maybe("the loss")
    return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)


def fails() -> None:
    raise ValueError("the seventh")


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """Other tests of this process may have left idle threads, which wait for whoever borrows
    them next.
    """
    _before.clear()
    _before.update(threading.enumerate())


def working() -> list[str]:
    """Threads of pipelines that are still there; those without work end once nobody holds them."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        gc.collect()
        left = [
            t.name
            for t in threading.enumerate()
            if t.name.startswith("lockstep cpu") and t not in _before
        ]
        if not left:
            return []
        time.sleep(0.02)
    return left


PLACES = {
    "before the first layer": ("forward", 0),
    "between": ("forward", 0),
    "a hook": ("forward", 1),
    "the loss": ("forward", 1),
    "a backward hook": ("backward", 1),
    "a function's backward": ("backward", 0),
    "a hook of a weight": ("backward", 0),
}


@pytest.mark.sweep
@pytest.mark.timeout(30)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=pytest.mark.slow if i % 2 else ()) for i, p in enumerate(PLACES)],
)
def test_what_raises_anywhere_stops_all_and_is_named(
    place: str, schedule: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Failing, "calls", 0)
    monkeypatch.setattr(Failing, "place", place)
    monkeypatch.setattr(Failing, "fail", staticmethod(fails), raising=False)
    job = _job(Failing, loss=loss, eval_data=None, metrics={})
    start = time.monotonic()
    with pytest.raises(ValueError, match="the seventh") as caught:
        train(job, strategy=PP(MAP, 4, schedule), devices="2xcpu", folder=tmp_path, quiet=True)
    way, stage = PLACES[place]
    (note,) = caught.value.__notes__
    assert note == f"raised in stage {stage} (cpu:{stage}), {way} of micro-batch 2, at step 2"
    assert time.monotonic() - start < 20
    del caught
    assert working() == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("place", ["between", "a function's backward"])
def test_ctrl_c_in_the_middle_leaves_nothing_running(place: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Failing, "calls", 0)
    monkeypatch.setattr(Failing, "place", place)
    monkeypatch.setattr(Failing, "fail", staticmethod(interrupted), raising=False)
    job = _job(Failing, loss=loss, eval_data=None, metrics={}, epochs=50)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(job, strategy=PP(MAP, 4), devices="2xcpu", folder=tmp_path, quiet=True)
    del caught
    assert working() == []


def interrupted() -> None:
    _thread.interrupt_main()
    time.sleep(0.3)  # the caller hears of it meanwhile


SCRIPT = """
import sys
sys.path[:0] = {folders}
import test_failing_stages as here
here.Failing.place, here.Failing.fail = {place!r}, staticmethod(here.fails)
job = here._job(here.Failing, loss=here.loss, eval_data=None, metrics={{}}, check_every=0)
here.train(job, strategy=here.PP(here.MAP, 4), devices="2xcpu", folder={folder!r}, quiet=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["between", "a function's backward"])
def test_a_script_that_fails_ends_with_its_traceback(place: str, tmp_path) -> None:
    folders = [str(parent) for parent in Path(__file__).parents[:2]]
    code = SCRIPT.format(folders=folders, place=place, folder=str(tmp_path))
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 1, ended.stderr[-2000:]
        assert "ValueError: the seventh" in ended.stderr and "micro-batch 2" in ended.stderr
