"""Datasets that can only be iterated: every rank reads the one stream, and keeps its share of each
global batch.

Global batch k is samples k*B to (k+1)*B of the stream, and a sample's place in the stream is its
number::

    stream    | 0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16
    rank 0    | 0 1 2 3         | 8 9 10 11             | 16
    rank 1    |         4 5 6 7 |           12 13 14 15 |

Each sample is read by every rank (its decoding too), the price of the same batches as on one
device; of a map-style dataset a rank makes only the samples of its share. The epoch ends where the
stream ends. The ranks compare what they have read, so that streams that differ are named, and no
rank waits for a batch that another one doesn't have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from lockstep.data.dataset_state import load_state, state_of
from lockstep.data.fetch import Pair, SampleMaker, number_of
from lockstep.data.loader import AnyLoader
from lockstep.data.loader_workers import without_worker_info
from lockstep.data.shares import ORDER, Batch, Cutting, absorbed, over_ranks
from lockstep.errors import JobError, RunError, SampleError, error_line
from lockstep.tensors.seeding import kept_states, seed_all

Read = tuple[int, int, list[Pair], Any]
"""Of a global batch: its samples, a number made of some, each share that isn't empty; the
stream's state after it.
"""


class StreamLoader(AnyLoader):
    """The loader of a stream. Where there are several ranks they go through it together: each batch
    is compared.

    If the dataset has ``set_epoch(epoch)``, that is called before it is gone through.
    ``draws_random = False`` on it says that it draws no random numbers, which saves seeding.
    """

    _fetching: Reader
    _begins: tuple[int, int, Any] | None = None

    def keep_states(self) -> None:
        """Keep the dataset's states on the first rank, since all ranks read the same."""
        super().keep_states()
        self._fetching.sends_state = not self._cutting.rank

    def begin_at(self, epoch: int, position: int, state: Any) -> None:
        """Go on there with a state that was kept, instead of going through the stream again."""
        self._begins = epoch, position, state

    def _fetcher(self) -> Reader:
        refused = {
            "order": self._by_person,
            "batches": self._lists_by_person,
            "cut_by": self._cut_by,
        }
        for setting, value in refused.items():
            if value is not None:
                raise JobError(
                    f"{setting}: {self._name} is a stream, which comes in its own order: give a "
                    "map-style dataset"
                )

        self.samples: int | None = None
        return Reader(self._dataset, self._cutting, **self._making)

    def _count_of_workers(self, wanted: int | None) -> int:
        # For an evaluation, the number was meant for train_data.
        if wanted is not None and wanted > 1 and not self._evaluation:
            raise JobError(
                f"loader_workers: {wanted}, but {self._name} is a stream, and each worker would "
                "read all of it: give 1 (reads ahead) or 0 (reads between steps)"
            )
        return min(1, super()._count_of_workers(wanted))

    def batches_of(self, epoch: int) -> None:
        """Global batches of an epoch: only its end tells, so None."""

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        batch_size = self._cutting.batch_size
        kept = None
        if self._begins is not None and self._begins[:2] == (epoch, start):
            kept = self._begins[2]
            self._begins = None

        requests = itertools.chain(
            [(epoch, start, True, kept)],
            ((epoch, index, False) for index in itertools.count(start + 1)),
        )
        read: Iterator[Read] = self._answers(requests)
        for index, (size, number, pairs, state) in enumerate(read, start):
            self._compare(index, size, number)
            self._keep(epoch, index + 1, state)
            if size < batch_size and not callable(getattr(self._dataset, "set_epoch", None)):
                self._keep(epoch + 1, 0, state)  # it counts the epochs itself
            first = index * batch_size
            if size:
                row = self._cutting.row(torch.arange(first, first + size))
                yield self._cutting.batch(row, pairs, index, epoch)
            if size < batch_size:
                self.samples = first + size
                return

    def _compare(self, index: int, size: int, number: int) -> None:
        """Raise on every rank where they haven't read the same: as many samples, and now and
        then the same ones.
        """
        world = self._world_to_compare()
        if world is None:
            return
        first, *others = over_ranks(world, size, number)
        for rank, other in enumerate(others, start=1):
            if other == first:
                continue
            how = f"batch {index} on rank {rank} differs from the one on rank 0"
            if other[0] != first[0]:
                end = index * self._cutting.batch_size + min(other[0], first[0])
                shorter, longer = (0, rank) if first[0] < other[0] else (rank, 0)
                how = f"it ends after {end} samples on rank {shorter}, and rank {longer} has more"
            kind = JobError if index == 0 else RunError
            raise kind(
                f"{self._name}: the stream is not the same on every rank: {how}",
                kind="unseeded data",
                fix="every rank must read the whole stream (don't cut it by rank)",
            )


class Reader(SampleMaker):
    """Reads a stream batch by batch, and puts together the shares of some ranks.

    Random numbers that the stream draws are seeded by (seed, epoch, place) before each sample, so
    every rank reads the same, and a skipped sample leaves the stream in the state that a used one
    would.

    Args:
        dataset: the stream.
        cutting: how its batches are cut.
        settings: of ``SampleMaker``.

    Attributes:
        sends_state: whether to give the stream's state after each batch.
    """

    def __init__(self, dataset: Any, cutting: Cutting, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self.sends_state = False
        self._cutting = cutting
        self._compared = cutting.world_size > 1 and cutting.rank is not None
        self._samples: Iterator[Any] | None = None
        self._place = 0  # samples that were read in this epoch
        self._gave = False  # whether there was a sample in any epoch

    def __call__(self, epoch: int, index: int, begins: bool, kept: Any = None) -> Read:
        """Read batch ``index`` of an epoch, the one after that of the last call, unless the epoch
        begins here.

        It has no samples once the stream has come to its end. With a state that was ``kept`` it is
        begun in that.
        """
        state = absorbed(self._stream, epoch)
        with kept_states() if self._draws else nullcontext(), without_worker_info():
            if begins:
                self._begin(epoch, state, index, kept)
            first = self._place
            samples = self._next(state)
            if begins and index == 0 and not samples:
                if kept is not None:  # the state was at the end of an epoch
                    self._samples = iter(self.dataset)
                    samples = self._next(state)
                if not samples:
                    self._refuse_empty()
            pairs = []
            for start, end, _ in self._cutting.spans(len(samples)):
                if end > start:
                    pairs.append(self._together(samples[start:end], epoch, first + start))

        number = 0
        # At batches 0, 1, 2, 4, 8, ...: enough to see streams that were cut by rank.
        if self._compared and samples and index & (index - 1) == 0:
            number = number_of([samples[0], samples[-1]]) >> 1
        after = state_of(self.dataset, self._place) if self.sends_state else None
        return len(samples), number, pairs, after

    def _next(self, state: int) -> list[Any]:
        """Read the samples of a global batch, fewer at the end of the stream."""
        return list(itertools.islice(self._left(state), self._cutting.batch_size))

    def _refuse_empty(self) -> None:
        """Refuse an epoch without a sample."""
        if not self._gave:
            raise JobError(f"{self._name}: it is empty")
        raise RunError(
            f"{self._name}: the stream has no samples left: it can be iterated only once; give a "
            "function that returns a new one (a generator function, say), or train with epochs=1"
        )

    def _begin(self, epoch: int, state: int, start: int, kept: Any) -> None:
        """Begin an epoch at global batch ``start``, in a state that was kept, or by skipping."""
        self._place = 0
        if self._draws:
            seed_all(absorbed(state, ORDER) >> 1)
        if kept is not None:
            load_state(self.dataset, kept, self._name)
        try:
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(epoch)
            self._samples = iter(self.dataset)
        except Exception as error:
            raise JobError(f"{self._name}: going through it raised {error_line(error)}") from error

        skipped = start * self._cutting.batch_size
        if kept is not None:
            self._place = skipped
            return

        for _ in itertools.islice(self._left(state), skipped):
            pass
        # A smaller last batch ends before its own end.
        if self._place <= skipped - self._cutting.batch_size:
            raise RunError(
                f"{self._name}: the stream has ended after {self._place} samples, but the run "
                f"had used {skipped} in this epoch: a stream must give the same samples each time"
            )

    def _left(self, state: int) -> Iterator[Any]:
        """Yield what is left of the stream, with random numbers that belong to the sample."""
        while self._samples is not None:
            if self._draws:
                seed_all(absorbed(state, self._place) >> 1)
            try:
                sample = next(self._samples)
            except StopIteration:
                self._samples = None
                return
            except Exception as error:
                raise SampleError(
                    f"{self._name}: sample {self._place} of the stream raised {error_line(error)}"
                ) from error
            self._place += 1
            self._gave = True
            yield sample
