"""A large sparse embedding: which module of the standard library a few lines are from, by their
hashed n-grams.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.launch.devices import Device, slots, usable_cores

CLASSES = 32
BUCKETS = 1 << 20
WIDTH = 64
FEATURES = 96
"""N-grams of a sample at most."""

LOSS = 1.0
"""Of the held-out samples, until which the clock runs; ln(32) is 3.47."""


class NGrams(nn.Module):
    """The mean of the n-grams' vectors, and a linear layer: (batch, FEATURES) to (batch,
    CLASSES).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", sparse=True, padding_idx=0)
        self.out = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.bag.weight, std=0.1)

    def forward(self, grams: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(grams))


@functools.cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """The words, and pairs of neighbours, of each four lines of the largest modules, hashed."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[
        :CLASSES
    ]
    rows, labels = [], []
    for label, path in enumerate(files):
        lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
        for start in range(0, len(lines) - 3, 2):
            words = " ".join(lines[start : start + 4]).split()
            grams = [*words, *map(" ".join, itertools.pairwise(words))]
            hashed = [1 + zlib.crc32(gram.encode()) % (BUCKETS - 1) for gram in grams][:FEATURES]
            rows.append(hashed + [0] * (FEATURES - len(hashed)))
            labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


def job(epochs: int = 12, lr: float = 16.0) -> lockstep.Job:
    """Every tenth sample is for evaluation."""
    rows, labels = samples()
    held_out = torch.arange(len(rows)) % 10 == 0
    return lockstep.Job(
        model=NGrams,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        train_data=TensorDataset(rows[~held_out], labels[~held_out]),
        eval_data=TensorDataset(rows[held_out], labels[held_out]),
        batch_size=128,
        epochs=epochs,
        on_event=[
            lambda event: (
                "stop" if event.kind == "evaluated" and event.metrics["eval_loss"] <= LOSS else None
            )
        ],
    )


def to_loss(strategy: str, devices: Any) -> Callable[[], float]:
    """Train until the loss is reached; 1 / the seconds of training that took.

    Evaluating isn't counted, nor what only the first epoch takes: ranks look once at what the model
    does in forward.
    """

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = lockstep.train(
                job(), strategy=strategy, devices=devices, folder=folder, quiet=True
            )
            assert run.history[-1]["eval_loss"] <= LOSS, (
                f"{strategy} did not reach the loss: {run.history[-1]}"
            )
            seconds = [record["seconds"] for record in run.history]
            return 1.0 / (statistics.median(seconds[1:]) * len(seconds))

    return once


def sparse() -> Mapping[str, Callable[[], float]]:
    one_core = Device("cpu", 0, usable_cores()[:1])
    return {
        "hogwild": to_loss("hogwild", slots(2)),
        "ddp": to_loss("ddp", slots(2)),
        "one core": to_loss("single", one_core),
    }
