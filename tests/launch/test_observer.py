"""Observers of updates: told of what a step does, each in its order, and of nothing once they
are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.launch.observer import Observer


class Listener(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    @contextlib.contextmanager
    def phase(self, kind: Any, words: str) -> Iterator[None]:
        self.heard.append(words)
        yield
        self.heard.append(f"end of {words}")

    def forwarded(self, where: str, part: Any, outputs: Any) -> None:
        self.heard.append(f"forwarded {part.size}")

    def gradients_ready(self) -> None:
        self.heard.append("gradients")


def test_an_observer_is_told_of_an_update_until_it_leaves() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.parallelize(model, nn.MSELoss(), optimizer, strategy="single", devices="1xcpu")
    listeners = [Listener(), Listener()]
    step.observers.extend(listeners)
    step(torch.randn(4, 3), torch.randn(4, 1))
    for listener in listeners:
        step.observers.remove(listener)
    step(torch.randn(4, 3), torch.randn(4, 1))
    inside = ["forwarded 4"]
    parts = {
        "forward and loss": inside,
        "backward": [],
        "gradients": None,
        "optimizer": [],
    }
    expected: list[str] = []
    for words, within in parts.items():
        expected += [words] if within is None else [words, *within, f"end of {words}"]
    assert [listener.heard for listener in listeners] == [expected, expected]


def test_no_method_of_another_object_is_replaced() -> None:
    source = Path(lockstep.__file__).parent
    replacing = {
        path.name for path in source.rglob("*.py") if "[method-assign]" in path.read_text()
    }
    of_checkpoints = "recompute.py"  # PyTorch's own, which take no generator
    # a forward: with another class in its place type(layer) would be another one
    of_layers = "sync_batchnorm.py"
    assert replacing == {of_checkpoints, of_layers}
