"""The order of an epoch: a permutation from (seed, epoch), or what a person's function gives:
the indices (``order``), or lists of indices, the global batches (``batches``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import ORDER, mixed
from lockstep.errors import JobError, error_line
from lockstep.tensors.seeding import kept_states, seed_all

_MOST = 1 << 20
"""Batches that an epoch may have: a generator may not end."""


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of a shuffled epoch: ``n`` indices from (seed, epoch), with no other
    generator moved.
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed(mixed(seed, epoch)))


def by_person(function: Callable[[int], Any], n: int, seed: int, epoch: int) -> Tensor:
    """Return what the person's ``order(epoch)`` gives, drawn under a seed of (seed, epoch).

    Args:
        function: the person's.
        n: samples of the dataset.
        seed: of the run.
        epoch: the number of the epoch.

    Raises:
        JobError: it raised, or gave something else than indices that exist.
    """
    where = f"order: for epoch {epoch} it"

    def drawn(epoch: int) -> Tensor:
        return indices_of(function(epoch), n, where)

    order: Tensor = _called(drawn, seed, epoch, where)
    return order


def listed(function: Callable[[int], Iterable[Any]], n: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the global batches that the person's ``batches(epoch)`` gives: a list, a tensor, a
    sampler of PyTorch or a generator, which is drawn whole.

    Args:
        function, n, seed, epoch: as those of ``by_person``.

    Raises:
        JobError: the function raised, gave something else than lists of indices that exist, or
            doesn't end.
    """
    where = f"batches: for epoch {epoch} it"

    def drawn(epoch: int) -> list[Any]:
        return list(itertools.islice(function(epoch), _MOST + 1))

    given = _called(drawn, seed, epoch, where)
    if not given:
        raise JobError(f"{where} gave no batch")
    if len(given) > _MOST:
        raise JobError(f"{where} gave more than {_MOST:,} batches: let it end, and set epochs")

    found = []
    for number, batch in enumerate(given):
        found.append(indices_of(batch, n, f"batches: as batch {number} of epoch {epoch} it"))
    return found


def _called(function: Callable[[int], Any], seed: int, epoch: int, where: str) -> Any:
    """Return what the person's function gives under a seed of (seed, epoch)."""
    with kept_states():
        seed_all(mixed(seed, ORDER, epoch))
        try:
            return function(epoch)
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"{where} raised {error_line(error)}") from error


def indices_of(given: Any, n: int, where: str) -> Tensor:
    """Return a copy of the indices that a person gave.

    Args:
        given: the indices.
        n: samples of the dataset.
        where: begins a message.

    Raises:
        JobError: they are something else than indices that exist.
    """
    try:
        indices = torch.as_tensor(given)
    except Exception as error:
        kind = type(given).__name__
        raise JobError(
            f"{where} gave a {kind}, a list of indices is expected ({error_line(error)})"
        ) from error

    if indices.dim() != 1 or not len(indices):
        raise JobError(f"{where} gave {tuple(indices.shape)}, a list of indices is expected")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise JobError(f"{where} gave {indices.dtype}, whole numbers are expected")

    indices = indices.to("cpu", torch.int64, copy=True)  # the person may change theirs
    low, high = indices.aminmax()
    if low < 0 or high >= n:
        wrong = int(low if low < 0 else high)
        raise JobError(f"{where} gave index {wrong}, the dataset has 0 to {n - 1}")

    return indices
