"""Alternating updates: ratings as products of what is known of a reader and of a book, learned in
turns.

lockstep train examples/several_losses/alternating.py --strategy ddp --devices 2

In odd steps readers move while books stay, in even steps books. The number of the step is
``update.step``, which is the same on every device; a counter of the function's own isn't.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

READERS, BOOKS = 40, 30


def ratings(count: int) -> TensorDataset:
    """Pairs of a reader and a book, (count, 2), and what the one gave the other, (count,)."""
    generator = torch.Generator().manual_seed(0)
    readers, books = (torch.randn(number, 3, generator=generator) for number in (READERS, BOOKS))
    pairs = torch.stack(
        [torch.randint(number, (count,), generator=generator) for number in (READERS, BOOKS)], dim=1
    )
    given = (readers[pairs[:, 0]] * books[pairs[:, 1]]).sum(dim=1)
    return TensorDataset(pairs, given + 0.1 * torch.randn(count, generator=generator))


def step(models: nn.ModuleDict, batch: Any, update: Any) -> None:
    """One of the two, by the number of the step."""
    pairs, given = batch
    found = (models["readers"](pairs[:, 0]) * models["books"](pairs[:, 1])).sum(dim=1)
    update("readers" if update.step % 2 else "books", (found - given).square().sum(), len(given))


def sgd(params: Any) -> torch.optim.Optimizer:
    """Of both; a batch has few ratings of each."""
    return torch.optim.SGD(params, lr=1.0)


def job(epochs: int = 20, width: int = 4, samples: int = 2000) -> lockstep.Job:
    """The job; its parameters are given as `--set width=8`."""
    return lockstep.Job(
        model=lambda: {
            "readers": nn.Embedding(READERS, width),
            "books": nn.Embedding(BOOKS, width),
        },
        optimizer={"readers": sgd, "books": sgd},
        lr_scheduler={
            name: lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for name in ("readers", "books")
        },
        step=step,
        train_data=lambda: ratings(samples),
        batch_size=64,
        epochs=epochs,
    )
