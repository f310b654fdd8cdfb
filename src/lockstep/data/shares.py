"""Which samples make a global batch, and which of them a process gets.

Global batch k of an epoch is ``order[k*B : (k+1)*B]``, whatever the number of processes. It is cut
in micro-batches, each of them in shares, as evenly as can be and the larger first. With B = 10, two
micro-batches, three ranks::

    order     | 4 9 0 7 2 | 5 1 8 3 6 |
    rank 0    | 4 9       | 5 1       |
    rank 1    |     0 7   |     8 3   |
    rank 2    |         2 |         6 |

Devices of different speeds may be given shares of other sizes (``weighted_sizes``). With costs of
the samples (``cut_by``) the pieces are of like cost, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import JobError
from lockstep.launch.world import World
from lockstep.tensors.rows import sizes_by_cost, weighted_sizes

_MASK = (1 << 64) - 1

_AT_ONCE = 256
"""Batches whose views are made by one operation."""

TRAINING = 1
EVALUATION = 2
ORDER = 3
COLLATE = 4
MAP = 5
"""Streams of random numbers of one seed, which must not meet."""


def absorbed(state: int, *numbers: int) -> int:
    """Return a 64-bit state that has taken in some more numbers.

    Every bit of a number moves every bit of the state, which a linear formula such as ``seed +
    1000 * epoch + index`` does not: there, two epochs share most of their streams.

    Source: the finaliser of splitmix64, over the sum of both
        (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    for number in numbers:
        z = (state + 0x9E3779B97F4A7C15 * (2 * number + 1)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        state = z ^ (z >> 31)
    return state


def mixed(*numbers: int) -> int:
    """Return a seed made of several numbers, in 63 bits, which every generator takes."""
    return absorbed(0, *numbers) >> 1


Row = tuple[Any, ...]
"""Of a global batch: its indices, the wanted spans of these, and the indices of each span."""


@dataclass(slots=True, eq=False)
class Part:
    """This process's share of one micro-batch.

    Attributes:
        inputs: of ``size`` samples; None where the share is empty.
        targets: likewise.
        size: samples of this share.
        of: samples of the whole micro-batch, all shares together.
        samples: the indices of this share in the dataset, where they are known.
        start: the place of its first sample in the global batch; -1 for samples of another rank.
    """

    inputs: Any
    targets: Any
    size: int
    of: int
    samples: Tensor | None = None
    start: int = -1


@dataclass(slots=True, eq=False)
class Batch:
    """This process's share of one global batch.

    Where it has one micro-batch, ``inputs, targets = batch`` takes it apart (both None for an empty
    share).

    Attributes:
        parts: a share for each micro-batch, in order; some may be empty.
        size: samples of the *global* batch.
        index: its number in the epoch, from 0.
        epoch: the number of the epoch, from 0.
        samples: the indices in the dataset of the whole global batch, where they are known.
        shares: where one process drives several devices, for each its part of each micro-batch;
            ``parts`` are then sizes only.
        collate: gives inputs and targets of some samples, and of parts of them, by lists of their
            indices; None where nobody can.
    """

    parts: list[Part]
    size: int
    index: int
    epoch: int
    samples: Tensor | None = None
    shares: list[list[Part]] | None = None
    collate: Callable[[Sequence[Sequence[int]]], list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        full = [part for part in self.parts if part.size]
        if len(full) > 1:
            raise JobError(
                f"accumulate: this batch has {len(full)} micro-batches: pass it to the step as a "
                "whole: step(batch)"
            )

        yield full[0].inputs if full else None
        yield full[0].targets if full else None


class Cutting:
    """How the global batches of an epoch are cut, and whose shares are wanted.

    Args:
        batch_size: samples of the *global* batch.
        accumulate: micro-batches that each is cut in.
        rank: of the process whose shares are wanted; None for all shares, where one process drives
            several devices.
        world_size: among how many each micro-batch is shared out.
        shares: the sizes of their parts, in proportion; none is even.

    Attributes:
        ranks: whose shares are wanted.
        costs: gives the costs of samples, by which batches are cut; None cuts by their number.

    Raises:
        JobError: a setting is wrong.
    """

    def __init__(
        self,
        batch_size: int,
        accumulate: int,
        rank: int | None,
        world_size: int,
        shares: Sequence[int] = (),
    ) -> None:
        sizes = {"batch_size": batch_size, "accumulate": accumulate, "world_size": world_size}
        for setting, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise JobError(f"{setting}: {value!r}, a whole number of at least 1 is expected")

        if rank is not None and not 0 <= rank < world_size:
            raise JobError(f"rank: {rank} is not one of {world_size}")
        if shares and (len(shares) != world_size or min(shares) < 1):
            raise JobError(
                f"shares: {tuple(shares)}, {world_size} whole numbers above 0 are expected"
            )

        self.batch_size = batch_size
        self.world_size = world_size
        self.rank = rank
        self.ranks = range(world_size) if rank is None else (rank,)
        self.costs: Callable[[Tensor], list[float]] | None = None
        self._accumulate = accumulate
        self._weights = shares or [1] * world_size
        self._of_full = self._spans(batch_size)

    def spans(self, size: int) -> list[tuple[int, int, int]]:
        """Return the wanted shares of a global batch of ``size`` samples: (start, end, samples of
        the micro-batch).

        Rank by rank, and for each of them micro-batch by micro-batch. Micro-batches without samples
        (where there are fewer samples than micro-batches) are left out.
        """
        return self._of_full if size == self.batch_size else self._spans(size)

    def _spans(self, size: int, costs: list[float] | None = None) -> list[tuple[int, int, int]]:
        found: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in self.ranks}
        start = 0
        for micro_batch in _sizes(size, [1] * self._accumulate, costs):
            if not micro_batch:
                continue
            end = start + micro_batch
            of_these = None if costs is None else costs[start:end]
            sizes = _sizes(micro_batch, self._weights, of_these)
            for rank in self.ranks:
                first = start + sum(sizes[:rank])
                found[rank].append((first, first + sizes[rank], micro_batch))
            start = end

        return [span for spans in found.values() for span in spans]

    def row(self, samples: Tensor) -> Row:
        """Return the row of a global batch."""
        size = len(samples)
        spans = self._of_full
        if self.costs is not None or size != self.batch_size:
            costs = None if self.costs is None else self.costs(samples)
            spans = self._spans(size, costs)
        shares = [samples[start:end] for start, end, _ in spans]
        return samples, spans, *shares

    def rows(self, order: Tensor, start: int = 0) -> Iterator[Row]:
        """Yield the row of each global batch from number ``start`` on."""
        size = self.batch_size
        if self.costs is not None:
            for first in range(start * size, len(order), size):
                yield self.row(order[first : first + size])
            return
        full = len(order) // size
        for first in range(start, full, _AT_ONCE):
            end = min(first + _AT_ONCE, full)
            block = order[first * size : end * size].view(-1, size)  # (batches, samples)
            shares = [block[:, a:b].unbind() for a, b, _ in self._of_full]
            spans = [self._of_full] * len(block)
            yield from zip(block.unbind(), spans, *shares, strict=True)
        last = order[full * size :]
        if len(last) and start <= full:
            yield self.row(last)

    def batch(self, row: Row, pairs: Iterable[tuple[Any, Any]], index: int, epoch: int) -> Batch:
        """Return the batch of a row.

        Args:
            row: of the batch.
            pairs: inputs and targets of each share that isn't empty.
            index, epoch: where the batch is.
        """
        samples, spans, *shares = row
        made = iter(pairs)
        parts = []
        for share, (start, end, of) in zip(shares, spans, strict=True):
            inputs, targets = next(made) if end > start else (None, None)
            parts.append(Part(inputs, targets, end - start, of, share, start))

        batch = Batch(parts, len(samples), index, epoch, samples)
        if self.rank is None:
            each = len(parts) // self.world_size  # micro-batches
            batch.shares = [parts[i : i + each] for i in range(0, len(parts), each)]
            batch.parts = [Part(None, None, part.of, part.of) for part in batch.shares[0]]

        return batch


def _sizes(total: int, weights: Sequence[int], costs: list[float] | None) -> list[int]:
    """Return the sizes of parts of some samples, by their costs where there are costs."""
    if costs is None:
        return weighted_sizes(total, weights)
    return sizes_by_cost(costs, weights)


def over_ranks(world: World, *numbers: int) -> list[list[int]]:
    """Return the whole numbers that each rank has, in rank order; every rank calls it.

    This is quicker than a gathering of objects.
    """
    if world.size == 1:
        return [[*numbers]]

    every = torch.zeros(world.size, len(numbers), dtype=torch.int64)
    every[world.rank] = torch.tensor(numbers)
    found: list[list[int]] = world.all_reduce(every.to(world.exchange_device)).tolist()
    return found
