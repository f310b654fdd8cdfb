"""What forward sets and puts back, under ``pp``: where another micro-batch would see it in
between, none overlaps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Job, parallelize, train
from lockstep.errors import StrategyError
from lockstep.strategies.pp import PP

from harness import differences  # isort: skip
from zoo import _job, drawn, labels, sgd  # isort: skip

BOUND = 1e-10
SPLIT = {"a": 0, "": 1}


class Layer(nn.Module):
    on = True
    of: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * (1 if self.on else -0.5)
        return y if self.of is None else y * self.of


class Two(nn.Module):
    """Two layers, on two stages, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = Layer(), Layer(), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.3)
        self.kept: dict[str, torch.Tensor] = {}

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x))


class Reference(Two):
    """A pass with the adapters off, then the real one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.on = self.b.on = False
        with torch.no_grad():
            before = self.layers(x)
        self.a.on = self.b.on = True
        return self.out(self.layers(x) - before)


class Told(Two):
    """The layers are told what they are conditioned on, for this call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.of = self.b.of = 1 + x.detach().mean(1, keepdim=True)
        y = self.layers(x)
        self.a.of = self.b.of = None
        return self.out(y)


class Keeping(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["a"] = x = self.a(x)
        x = self.b(x) + self.kept["a"]
        self.kept.clear()
        return self.out(x)


class Evaluated(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        training = self.training
        self.drop.eval()
        with torch.no_grad():
            before = self.layers(x)
        self.drop.train(training)
        return self.out(self.layers(x) + before)


class Fixed(Two):
    """As in a GAN: the critic is fixed for one of two terms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.requires_grad_(False)
        made = self.layers(x)
        self.b.requires_grad_(True)
        return self.out(made + self.b(x))


class Thawing(Two):
    """What a layer takes depends on the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.linear.weight.requires_grad = not (self.training and bool(x.max() > 1.7))
        return super().forward(x)


class Exchanged(Two):
    """Another module in the place of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, self.drop = self.drop, nn.Identity()
        y = self.layers(x)
        self.drop = own
        return self.out(y)


class Caught(Two):
    """An activation that a hook catches, which is taken away again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caught: list[torch.Tensor] = []
        hook = self.a.register_forward_hook(lambda module, args, output: caught.append(output))
        x = self.layers(x)
        hook.remove()
        return self.out(x + sum(caught))


class Within(Layer):
    """It sets and puts back only what is its own, within its own call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of = 1 + x.detach().mean(1, keepdim=True)
        self.linear.eval()
        y = super().forward(x)
        self.linear.train(self.training)
        self.of = None
        return y


class Harmless(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Within(), Within()


IN_TURN = {
    Reference: "a.on",
    Told: "a.of",
    Keeping: "kept",
    Evaluated: "drop.training",
    Fixed: "b.linear.weight",
    Thawing: "a.linear.weight",
    Exchanged: "drop",
    Caught: "a._forward_hooks",
}
"""What forward changes, and puts back."""


def job_of(model: Callable[[], nn.Module]) -> Job:
    return _job(model).replace(precision="fp64", optimizer=sgd)


def hold(job: Job, way: PP, tmp_path: Any) -> None:
    """The numbers are those of one device."""
    run = train(job, strategy=way, devices="2xcpu", folder=tmp_path)
    one = train(
        job,
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
        accumulate=way.num_microbatches(job),
    )
    found = differences(job, run, one)
    assert found.within(BOUND), str(found)


@pytest.mark.sweep
@pytest.mark.parametrize("model", IN_TURN)
def test_what_another_micro_batch_would_see_in_between_keeps_it_waiting(
    model: type[Two], tmp_path, capsys
) -> None:
    hold(job_of(model), PP(SPLIT, 3), tmp_path)
    assert f'note: forward changes "{IN_TURN[model]}"' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("model", IN_TURN)
def test_so_it_does_under_every_schedule(model: type[Two], tmp_path) -> None:
    for way in (PP(SPLIT, 5, "gpipe"), PP(SPLIT, 8), PP({"a": 1, "": 0}, 4)):
        hold(job_of(model), way, tmp_path)


@pytest.mark.filterwarnings("ignore:dropout masks differ")  # from those of a whole batch
def test_what_a_layer_sets_within_its_own_call_keeps_nobody_waiting(tmp_path, capsys) -> None:
    hold(job_of(Harmless), PP(SPLIT, 3), tmp_path)
    assert "micro-batches run one after another" not in capsys.readouterr().out
    step = parallelize(
        Harmless(), nn.CrossEntropyLoss(), sgd, strategy=PP(SPLIT, 3), devices="2xcpu"
    )
    for _ in range(2):
        step(drawn(8, 6), labels(8, 3))
    assert step.runner.overlaps


class CaughtLater(Two):
    """From the third update on a hook catches the activations of whoever comes by."""

    updates = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.updates < 3:
            return super().forward(x)
        caught: list[torch.Tensor] = []
        hook = self.a.register_forward_hook(lambda module, args, output: caught.append(output))
        x = self.b(self.a(x))
        time.sleep(0.1)
        hook.remove()
        return self.out(x + sum(caught))


def come_later(schedule: str) -> None:
    """What a process of its own does: a thread whose backward failed may end it, in PyTorch's
    C++, as it exits.
    """
    step = parallelize(
        CaughtLater(), nn.CrossEntropyLoss(), sgd, strategy=PP(SPLIT, 3, schedule), devices="2xcpu"
    )
    for CaughtLater.updates in (1, 2, 3):
        try:
            step(drawn(9, 6), labels(9, 3))
        except StrategyError as error:
            print(CaughtLater.updates, error, flush=True)
            os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_backward_that_comes_to_another_micro_batch_fails_and_does_not_wait(
    schedule: str,
) -> None:
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = (
        f"import sys; sys.path[:0] = {folders}; import test_temporary_changes_in_forward as here; "
        f"here.come_later({schedule!r})"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(
        "3 stage 0, backward of micro-batch 0: backward reached tensors of micro-batch "
    ), done.stderr
