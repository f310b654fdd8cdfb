"""Global batches that a person's function lists: ``batches(epoch)`` gives lists of indices.

A list, a tensor, a sampler of PyTorch or a generator is drawn whole where the epoch begins, under a
seed made of (seed, epoch).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from lockstep.data.loader import Loader
from lockstep.data.order import indices_of
from lockstep.data.shares import ORDER, Row, mixed
from lockstep.errors import JobError, RunError, error_line
from lockstep.tensors.seeding import kept_states, seed_all

_MOST = 1 << 20
"""Batches that an epoch may have: a generator may not end."""


def listed(function: Callable[[int], Iterable[Any]], n: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the batches of one epoch.

    Args:
        function: the person's.
        n: samples of the dataset.
        seed: of the run.
        epoch: the number of the epoch.

    Raises:
        JobError: the function raised, gave something else than lists of indices that exist, or
            doesn't end.
    """
    with kept_states():
        seed_all(mixed(seed, ORDER, epoch))
        try:
            given = list(itertools.islice(function(epoch), _MOST + 1))
        except Exception as error:
            raise JobError(f"batches: for epoch {epoch} it raised {error_line(error)}") from error

    if not given:
        raise JobError(f"batches: for epoch {epoch} it gave no batch")
    if len(given) > _MOST:
        raise JobError(
            f"batches: for epoch {epoch} it gave more than {_MOST:,} batches: let it end, and set "
            "epochs"
        )

    found = []
    for number, batch in enumerate(given):
        where = f"batches: as batch {number} of epoch {epoch} it"
        found.append(indices_of(batch, n, where))
    return found


class ListLoader(Loader):
    """The loader of a map-style dataset in batches that a person's function lists."""

    _cuts_each = True

    def _count_samples(self) -> None:
        self._held = None
        batches = self.orders(0)
        self._first = len(batches)
        self.samples = sum(map(len, batches))

    def _order_of(self, epoch: int) -> list[Tensor]:
        assert self._lists_by_person is not None
        return listed(self._lists_by_person, self._length, self._seed, epoch)

    def __len__(self) -> int:
        """Return the number of global batches of the first epoch."""
        return self._first

    def batches_of(self, epoch: int) -> int:
        """Return the number of global batches of this epoch."""
        return len(self.orders(epoch)) if epoch else self._first

    def _rows(self, epoch: int, start: int) -> Iterator[Row]:
        batches = self.orders(epoch)
        self._compare(f"batches: for epoch {epoch} the indices", batches, "epoch")
        if len(batches) < start:
            raise RunError(
                f"batches: for epoch {epoch} it gave {len(batches)} batches, but the run had used "
                f"{start}: they must depend on the epoch only"
            )
        return map(self._cutting.row, batches[start:])
