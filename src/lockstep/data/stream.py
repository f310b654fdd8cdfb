"""Datasets that can only be gone through: every rank reads the one stream, and keeps its share of each global batch.

Global batch k is samples k*B to (k+1)*B of the stream, and a sample's place in the stream is its number::

    stream    | 0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16
    rank 0    | 0 1 2 3         | 8 9 10 11             | 16
    rank 1    |         4 5 6 7 |           12 13 14 15 |

Each sample is read by every rank (its decoding too), which is the price of the numbers of one device; of a map-style
dataset a rank makes only the samples of its share. The epoch ends where the stream ends. The ranks compare what they
have read, so that streams that differ are named, and no rank waits for a batch that another one doesn't have.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.data.fetch import Collate, Pair, together
from lockstep.data.loader_workers import Workers, default_workers, free_cores
from lockstep.data.prefetch import copied_ahead
from lockstep.data.shares import COLLATE, EVALUATION, ORDER, TRAINING, Batch, Part, absorbed, checked_cutting, cuts
from lockstep.errors import JobError, RunError, SampleError, told
from lockstep.launch import world as _world
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import parts
from lockstep.tensors.seeding import kept_states, seed_all

Read = tuple[int, int, int, list[Pair]]
"""Of a global batch: its place in the stream, its samples, a number made of some, and each share that isn't empty."""


def stream_notes(shuffle: bool, meets: bool) -> Iterator[str]:
    """What a person has to know who trains on a stream, a line each.

    Args:
        shuffle: whether the order is to be drawn.
        meets: whether the ranks would not wait for one another otherwise.
    """
    if shuffle:
        yield (
            "train_data is a stream, which can't be shuffled: it comes in its own order, the same on every rank "
            "(shuffle=False says so too)"
        )
    if meets:
        yield (
            "train_data is a stream, of which the ranks compare what they have read before each step: there they wait "
            "for one another, as they would not with a dataset that has __getitem__ and __len__"
        )


class StreamLoader:
    """``Loader``, and ``SharedLoader``, for a stream.

    Where there are several ranks they go through it together: each batch is compared.

    Args:
        dataset: gives samples ``(inputs, targets)`` each time it is gone through. If it has ``set_epoch(epoch)``, that
            is called before. ``draws_random = False`` on it says that it draws no random numbers, which saves seeding.
        batch_size: samples of the *global* batch.
        rank: this process's number; None where one process drives all ``world_size`` devices: its batches have
            ``shares``.
        workers: loader workers of this process, 0 or 1: a second one would read the whole stream too.
        order: refused.
        settings: the others are as those of ``Loader``.

    Attributes:
        samples: of an epoch; None until one has been gone through.

    Raises:
        JobError: a setting is wrong.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int | None = 0,
        world_size: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], Any] | None = None,
        collate: Collate | None = None,
        workers: int | None = None,
        device: torch.device | None = None,
        evaluation: bool = False,
        pin: bool | None = None,
        name: str | None = None,
    ) -> None:
        del shuffle  # a stream comes as it comes; who tells the person says so
        checked_cutting(batch_size, accumulate, rank or 0, world_size)
        self._name = name or ("eval_data" if evaluation else "train_data")
        if order is not None:
            raise JobError(f"order: {self._name} is a stream, which comes in its own order: give a map-style dataset")
        self._batch_size, self._rank, self._world_size, self._accumulate = batch_size, rank, world_size, accumulate
        self._ranks = range(world_size) if rank is None else range(rank, rank + 1)
        self._device = None if device is None or device.type == "cpu" else device
        self._pin = self._device is not None and (self._device.type in ("cuda", "xpu") if pin is None else pin)
        self._reader = Reader(
            dataset, batch_size, accumulate, self._ranks, world_size,
            seed=seed, evaluation=evaluation, collate=collate, name=self._name,
        )  # fmt: skip
        self._workers = Workers(self._reader, 1, self._pin) if self._one_worker(workers, evaluation) else None
        self.samples: int | None = None
        self._next = 0

    def _one_worker(self, workers: int | None, evaluation: bool) -> bool:
        if workers is None:
            world = _world.current()
            return default_workers(len(free_cores()), world.local_size if world else 1, None) > 0
        if workers < 0:
            raise JobError(f"loader_workers: {workers}, a whole number from 0 is expected")
        if workers > 1 and not evaluation:  # there, the number was meant for train_data
            raise JobError(
                f"loader_workers: {workers}, but {self._name} is a stream, and each of them would read all of it: "
                "1 reads ahead, 0 reads in between"
            )
        return workers > 0

    def batches_of(self, epoch: int) -> None:
        """Global batches of an epoch: only its end tells, so None."""

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch: the first time epoch 0."""
        self._next += 1
        return self.epoch(self._next - 1)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from global batch ``start`` on (those before are skipped).

        Raises:
            JobError: the stream is empty, a sample isn't a pair, or ranks read different streams.
            RunError: it can't be gone through a second time, or ranks read different streams.
            SampleError: it raised; the sample's number is given.
        """
        batches = self._batches(epoch, start)
        return batches if self._device is None else copied_ahead(batches, self._device, self._pin)

    def close(self) -> None:
        """End the loader worker, where there is one."""
        if self._workers is not None:
            self._workers.close()

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        requests = ((epoch, k, k == start) for k in itertools.count(start))
        read: Iterator[Read] = (
            (self._reader(*request) for request in requests) if self._workers is None else self._workers.fetch(requests)
        )
        for index, (first, size, made, pairs) in enumerate(read, start):
            self._compare(index, size, made)
            if size:
                yield self._batch(epoch, index, size, pairs)
            if size < self._batch_size:
                self.samples = first + size
                return

    def _batch(self, epoch: int, index: int, size: int, pairs: Sequence[Pair]) -> Batch:
        left = iter(pairs)
        samples = torch.arange(index * self._batch_size, index * self._batch_size + size)
        shares = []
        for rank in self._ranks:
            mine = []
            for a, b, of in cuts(size, self._accumulate, rank, self._world_size):
                inputs, targets = next(left) if b > a else (None, None)
                mine.append(Part(inputs, targets, b - a, of, samples[a:b]))
            shares.append(mine)
        if self._rank is not None:
            return Batch(shares[0], size, index, epoch, samples)
        wholes = [Part(None, None, part.of, part.of) for part in shares[0]]
        return Batch(wholes, size, index, epoch, samples, shares)

    def _compare(self, index: int, size: int, made: int) -> None:
        """Make sure that all ranks have read the same: as many samples, and now and then the same ones.

        Raises:
            JobError, RunError: they haven't; every rank raises.
        """
        world = _world.current()
        if world is None or world.size == 1 or world.size != self._world_size:
            return
        device = torch.device("cpu") if world.backend == "gloo" else world.device.torch
        every = torch.zeros(world.size, 2, dtype=torch.int64)
        every[world.rank] = torch.tensor([size, made])
        sizes, numbers = world.all_reduce(every.to(device)).cpu().T.tolist()
        for rank, (other, number) in enumerate(zip(sizes, numbers, strict=True)):
            if (other, number) == (sizes[0], numbers[0]):
                continue
            end = index * self._batch_size + min(other, sizes[0])
            shorter, longer = (0, rank) if sizes[0] < other else (rank, 0)
            how = (
                f"it ends after {end} samples on rank {shorter}, and rank {longer} has more"
                if other != sizes[0]
                else f"batch {index} has other samples on rank {rank} than on rank 0"
            )
            raise (JobError if index == 0 else RunError)(
                f"{self._name}: the stream is not the same on every rank: {how}",
                kind="unseeded data",
                fix="every rank has to read all of it (don't cut it by rank), and keeps its share",
            )


class Reader:
    """Reads a stream batch by batch, and puts together the shares of some ranks.

    Random numbers that the stream draws are seeded by (seed, epoch, place) before each sample, so every rank reads the
    same, and a skipped sample leaves the stream in the state that a used one would.

    Args:
        ranks: whose shares.
        settings: as those of ``StreamLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        accumulate: int,
        ranks: Sequence[int],
        world_size: int,
        *,
        seed: int,
        evaluation: bool,
        collate: Collate | None,
        name: str,
    ) -> None:
        self._dataset, self._collate, self._name = dataset, collate, name
        self._batch_size, self._accumulate, self._ranks, self._world_size = batch_size, accumulate, ranks, world_size
        self._stream = absorbed(absorbed(0, seed), EVALUATION if evaluation else TRAINING)
        self._draws = getattr(dataset, "draws_random", True)
        self._compared = world_size > 1 and len(ranks) == 1
        self._samples: Iterator[Any] | None = None
        self._place = 0
        self._gave = False

    def __call__(self, epoch: int, index: int, begins: bool) -> Read:
        """The batch number ``index`` of an epoch; of no samples once the stream has come to its end.

        Args:
            epoch: the number of the epoch.
            index: one more than that of the call before, unless it begins.
            begins: go through the stream from its beginning.

        Raises:
            JobError: there is no sample at all, or they can't be put together.
            RunError: there is none left.
            SampleError: the stream raised.
        """
        with kept_states() if self._draws else nullcontext():
            state = absorbed(self._stream, epoch)
            if begins:
                self._begin(epoch, state, index)
            first = self._place
            samples = list(itertools.islice(self._left(state), self._batch_size))
            if begins and index == 0 and not samples:
                self._refuse_empty()
            pairs = []
            for rank in self._ranks:
                for a, b, _ in cuts(len(samples), self._accumulate, rank, self._world_size) if samples else ():
                    if b == a:
                        continue
                    if self._collate is not None and self._draws:
                        seed_all(absorbed(absorbed(state, first + a), COLLATE) >> 1)
                    pairs.append(together(samples[a:b], self._collate, self._name))
        # At batches 0, 1, 2, 4, 8, ...: enough to see streams that were cut by rank.
        looks = self._compared and samples and index & (index - 1) == 0
        return first, len(samples), number_of([samples[0], samples[-1]]) >> 1 if looks else 0, pairs

    def _begin(self, epoch: int, state: int, start: int) -> None:
        self._place = 0
        if self._draws:
            seed_all(absorbed(state, ORDER) >> 1)
        try:
            if callable(getattr(self._dataset, "set_epoch", None)):
                self._dataset.set_epoch(epoch)
            self._samples = iter(self._dataset)
        except Exception as error:
            raise JobError(f"{self._name}: going through it raised {told(error)}") from error
        skipped = start * self._batch_size
        for _ in itertools.islice(self._left(state), skipped):
            pass
        if self._place <= skipped - self._batch_size:  # a smaller last batch ends before its own end
            raise RunError(
                f"{self._name}: the stream has ended after {self._place} samples, and the run had used {skipped} of "
                "this epoch: does it give the same samples each time?"
            )

    def _left(self, state: int) -> Iterator[Any]:
        """What is left of the stream, with random numbers that belong to the sample."""
        while self._samples is not None:
            if self._draws:
                seed_all(absorbed(state, self._place) >> 1)
            try:
                sample = next(self._samples)
            except StopIteration:
                self._samples = None
                return
            except Exception as error:
                raise SampleError(f"{self._name}: sample {self._place} of the stream raised {told(error)}") from error
            self._place += 1
            self._gave = True
            yield sample

    def _refuse_empty(self) -> None:
        if not self._gave:
            raise JobError(f"{self._name}: it is empty")
        raise RunError(
            f"{self._name}: the stream has no samples left: it can be gone through only once; "
            "give a function that makes it anew (a generator function, say), or train with epochs=1"
        )


def number_of(nest: Any) -> int:
    """A number of 64 bits made of a sample, the same in each process."""
    inside = parts(nest)
    if inside is not None:
        state = len(inside)
        for part in inside:
            state = absorbed(state, number_of(part))
        return state
    if isinstance(nest, Tensor):
        sums = digest(nest)
        return 0 if sums is None else absorbed(*sums)
    if isinstance(nest, int | float | str | bytes):
        return zlib.crc32(repr(nest).encode())
    return zlib.crc32(nest.tobytes()) if hasattr(nest, "tobytes") else 0
