"""Global batches that a person's function lists: ``batches(epoch)`` gives lists of indices.

What has a length (a list, a tensor, a sampler of PyTorch) is taken whole. Anything else, as a
generator, is drawn a few batches ahead of their use, and only its end tells how many there are. All
of it draws random numbers from streams of its own, made of (seed, epoch).
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
from lockstep.tensors.seeding import kept_states, put_states, seed_all, states

_AHEAD = 16
"""Batches that ranks compare at once, where their number isn't known."""

_END = object()


class ListedBatches:
    """The batches of one epoch.

    Args:
        function: the person's.
        n: samples of the dataset.
        seed: of the run.
        epoch: the number of the epoch.

    Attributes:
        whole: all batches; None where only going through them tells.

    Raises:
        JobError: the function raised, or gave something else than lists of indices that exist.
    """

    def __init__(
        self, function: Callable[[int], Iterable[Any]], n: int, seed: int, epoch: int
    ) -> None:
        self._n = n
        self._epoch = epoch
        self.whole: list[Tensor] | None = None
        with kept_states():
            seed_all(mixed(seed, ORDER, epoch))
            try:
                given = function(epoch)
                self._left = iter(given)
                if hasattr(given, "__len__"):
                    self._left = iter(list(self._left))
            except Exception as error:
                raise JobError(
                    f"batches: for epoch {epoch} it raised {error_line(error)}"
                ) from error
            self._states = states()

        if hasattr(given, "__len__"):
            self.whole = list(self._checked(self._left))

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the batches, those without a known number once only."""
        return iter(self.whole or self._checked(self._drawn()))

    def _drawn(self) -> Iterator[Any]:
        """Yield batches as the function gives them, each drawn from streams of its own."""
        while True:
            with kept_states():
                put_states(self._states)
                try:
                    batch = next(self._left, _END)
                except Exception as error:
                    raise JobError(
                        f"batches: for epoch {self._epoch} it raised {error_line(error)}"
                    ) from error
                self._states = states()

            if batch is _END:
                return
            yield batch

    def _checked(self, given: Iterator[Any]) -> Iterator[Tensor]:
        """Yield batches as indices."""
        number = -1
        for number, batch in enumerate(given):
            where = f"batches: as batch {number} of epoch {self._epoch} it"
            yield indices_of(batch, self._n, where)

        if number < 0:
            raise JobError(f"batches: for epoch {self._epoch} it gave no batch")


class ListLoader(Loader):
    """The loader of a map-style dataset in batches that a person's function lists."""

    _cuts_each = True

    def _count_samples(self) -> None:
        self._last: tuple[int, ListedBatches] | None = None
        whole = self._listed(0).whole
        self._first = None if whole is None else len(whole)
        self.samples = None if whole is None else sum(map(len, whole))

    def _listed(self, epoch: int) -> ListedBatches:
        """Return the batches of an epoch; the last ones that were taken whole are kept."""
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        assert self._lists_by_person is not None
        self._last = None
        listed = ListedBatches(self._lists_by_person, self._length, self._seed, epoch)
        if listed.whole is not None:
            self._last = epoch, listed
        return listed

    def __len__(self) -> int:
        """Return the number of global batches of the first epoch.

        Raises:
            TypeError: only going through them tells.
        """
        if self._first is None:
            raise TypeError("batches gives a generator, whose length isn't known")
        return self._first

    def batches_of(self, epoch: int) -> int | None:
        """Return the number of global batches of this epoch; None where only its end tells."""
        if self._first is None or epoch == 0:
            return self._first
        whole = self._listed(epoch).whole
        return None if whole is None else len(whole)

    def _rows(self, epoch: int, start: int) -> Iterator[Row]:
        listed = self._listed(epoch)
        if listed.whole is not None:
            self._compare_indices(epoch, listed.whole)

        batches = iter(listed)
        skipped = sum(1 for _ in itertools.islice(batches, start))
        if skipped < start:
            raise RunError(
                f"batches: for epoch {epoch} it gave {skipped} batches, but the run had used "
                f"{start}: they must depend on the epoch only"
            )
        return map(self._cutting.row, batches)

    def _agreed(self, epoch: int, rows: Iterator[Row]) -> Iterator[Row]:
        if self._first is not None:
            yield from rows
            return

        block = None
        while block != []:
            block = list(itertools.islice(rows, _AHEAD))
            self._compare_indices(epoch, [row[0] for row in block])
            yield from block

    def _compare_indices(self, epoch: int, indices: list[Tensor]) -> None:
        """Refuse batches that differ between the ranks."""
        self._compare(f"batches: for epoch {epoch} the indices", indices, "epoch")
