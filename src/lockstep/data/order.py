"""The order of an epoch, which is sliced and never needed whole.

A permutation in memory takes 8 bytes a sample on every rank: 100 million samples on 8 ranks are 6.4
GB. So beyond a million samples the permutation is a keyed function of the place, computed for a
slice when the slice is wanted. It is a Feistel network over the cells of a table of just over n
cells::

    place = (row, column)     row    = (row    + hash(column, key 0)) mod rows
                              column = (column + hash(row,    key 1)) mod columns
                              row    = (row    + hash(column, key 2)) mod rows      ...

Each line can be undone, so the whole is a permutation of the cells. A cell beyond n is sent through
again until it falls below ("cycle walking"); the table has fewer than sqrt(n) cells too many, so
hardly any is.

Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002 (their
    generalized-Feistel cipher).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import ORDER, Order, mixed
from lockstep.errors import JobError, error_line
from lockstep.tensors.pytree import to_device
from lockstep.tensors.seeding import kept_states, seed_all

_IN_MEMORY = 1 << 20
"""Samples up to which a permutation is kept as a tensor, of 8 MB then."""

_ROUNDS = 8
"""Lines of the network."""

_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""The factors of splitmix64, as signed numbers."""


class Ascending:
    """The order 0, 1, ..., n - 1."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, span: slice, /) -> Tensor:
        start, stop, _ = span.indices(self._n)
        return torch.arange(start, stop)


class Placed:
    """An order whose slices come to a device, on which they select rows."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._order, self._device = order, device

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, span: slice, /) -> Tensor:
        indices: Tensor = to_device(self._order[span], self._device)
        return indices


class Scattered:
    """A permutation of 0 to n - 1 from (seed, epoch), whose slices are computed one by one, without
    memory.

    Args:
        n: how many; below 2**61.
        seed: of the run.
        epoch: the number of the epoch.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n = n
        self._rows = max(1, math.isqrt(n))
        self._columns = -(-n // self._rows)
        self._keys = [mixed(seed, epoch, i) for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, span: slice, /) -> Tensor:
        start, stop, _ = span.indices(self._n)
        found = self._sent(torch.arange(start, stop))
        while len(beyond := torch.nonzero(found >= self._n).squeeze(1)):
            found[beyond] = self._sent(found[beyond])
        return found

    def _sent(self, cells: Tensor) -> Tensor:
        """Return where each cell of the table goes. cells: (places,)"""
        row = cells.div(self._columns, rounding_mode="floor")
        column = cells.sub_(row * self._columns)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                _shift(row, column, key, self._rows)
            else:
                _shift(column, row, key, self._columns)

        return row.mul_(self._columns).add_(column)


def _shift(numbers: Tensor, by: Tensor, key: int, size: int) -> None:
    """Add a hash of other numbers to these in place, modulo ``size``."""
    numbers.add_(_hashed(by, key, size))
    numbers.sub_(numbers.ge(size).to(torch.int64).mul_(size))


def _hashed(numbers: Tensor, key: int, size: int) -> Tensor:
    """Return a number below ``size`` (at most 2**31) for each number, by the high bits of two
    wrapping multiplications.
    """
    z = (numbers ^ key).mul_(_FACTORS[0])
    z = (z ^ (z >> 29)).mul_(_FACTORS[1])
    return z.bitwise_right_shift_(33).bitwise_and_(0x7FFFFFFF).mul_(size).bitwise_right_shift_(31)


def permutation(n: int, seed: int, epoch: int) -> Order:
    """Return the order of a shuffled epoch: ``n`` indices from (seed, epoch), with no other
    generator moved.
    """
    if n > _IN_MEMORY:
        return Scattered(n, seed, epoch)
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
    with kept_states():
        seed_all(mixed(seed, ORDER, epoch))
        try:
            order = torch.as_tensor(function(epoch))
        except Exception as error:
            raise JobError(f"{where} raised {error_line(error)}") from error

    return indices_of(order, n, where)


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
        raise JobError(f"{where} gave a {kind}, a list of indices is expected") from error

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
