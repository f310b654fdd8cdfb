"""Which samples make a global batch, and which of them a process gets.

Global batch k of an epoch is ``order[k*B : (k+1)*B]``, whatever the number of processes. It is cut in micro-batches,
each of them in shares, always as evenly as can be and the larger first. With B = 10, two micro-batches, three ranks::

    order     | 4 9 0 7 2 | 5 1 8 3 6 |
    rank 0    | 4 9       | 5 1       |
    rank 1    |     0 7   |     8 3   |
    rank 2    |         2 |         6 |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lockstep.errors import JobError
from lockstep.tensors.pytree import share_sizes

_MASK = (1 << 64) - 1

_AT_ONCE = 256
"""Batches whose views are made by one operation: enough to hide its cost, few enough to start an epoch at once."""

_INDICES_AT_ONCE = 1 << 16
"""Indices that an order is asked for at once, where one batch has fewer: 4 ms of computing, where it is computed."""

TRAINING, EVALUATION, ORDER, COLLATE, MAP = 1, 2, 3, 4, 5
"""Streams of random numbers of one seed, which must not meet."""


def absorbed(state: int, number: int) -> int:
    """A 64-bit state that has taken in one more number (the finaliser of splitmix64 over their sum).

    Every bit of the number moves every bit of the state, which a linear formula such as ``seed + 1000 * epoch + index``
    does not: there, two epochs share most of their streams.
    """
    z = (state + 0x9E3779B97F4A7C15 * (2 * number + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mixed(*numbers: int) -> int:
    """A seed made of several numbers, in 63 bits, which every generator takes."""
    state = 0
    for number in numbers:
        state = absorbed(state, number)
    return state >> 1


@dataclass(slots=True, eq=False)
class Part:
    """This process's share of one micro-batch.

    Attributes:
        inputs: of ``size`` samples; None where the share is empty.
        targets: likewise.
        size: samples of this share.
        of: samples of the whole micro-batch, all shares together.
        samples: the indices of this share in the dataset, where they are known.
    """

    inputs: Any
    targets: Any
    size: int
    of: int
    samples: Tensor | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """This process's share of one global batch.

    Where it has one micro-batch, ``inputs, targets = batch`` takes it apart (both None for an empty share).

    Attributes:
        parts: a share for each micro-batch, in order; some may be empty.
        size: samples of the *global* batch.
        index: its number in the epoch, from 0.
        epoch: the number of the epoch, from 0.
        samples: the indices in the dataset of the whole global batch, where they are known.
        shares: where one process drives several devices, for each its part of each micro-batch; ``parts`` are then
            sizes only.
    """

    parts: list[Part]
    size: int
    index: int
    epoch: int
    samples: Tensor | None = None
    shares: list[list[Part]] | None = None

    def __iter__(self) -> Iterator[Any]:
        full = [part for part in self.parts if part.size]
        if len(full) > 1:
            raise JobError(
                f"accumulate: this batch has {len(full)} micro-batches: give it whole to the step: step(batch)"
            )
        yield full[0].inputs if full else None
        yield full[0].targets if full else None


def cuts(size: int, accumulate: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """A process's share of each micro-batch of a global batch: (start, end, samples of the micro-batch).

    Micro-batches without samples (where there are fewer samples than micro-batches) are left out.
    """
    found = []
    start = 0
    for micro in share_sizes(size, min(accumulate, size)):
        sizes = share_sizes(micro, world_size)
        mine = start + sum(sizes[:rank])
        found.append((mine, mine + sizes[rank], micro))
        start += micro
    return found


def pieces(order: Order, batch_size: int, spans: Spans, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """For each global batch from number ``start``: its indices, then those of this process's share of each micro-batch.

    Args:
        order: the indices of an epoch, asked for in blocks of some batches.
        spans: the shares of a full batch, and those of the last, smaller one.
    """
    full = len(order) // batch_size
    at_once = max(1, min(_AT_ONCE, _INDICES_AT_ONCE // batch_size))
    for first in range(start, full, at_once):
        block = order[first * batch_size : min(first + at_once, full) * batch_size].view(-1, batch_size)
        yield from zip(block.unbind(), *(block[:, a:b].unbind() for a, b, _ in spans.full), strict=True)
    last = order[full * batch_size :]
    if len(last) and start <= full:
        yield (last, *(last[a:b] for a, b, _ in spans.last))


def checked_cutting(batch_size: int, accumulate: int, rank: int, world_size: int) -> None:
    """Make sure that batches can be cut so.

    Raises:
        JobError: with the setting that is wrong.
    """
    for setting, value in (("batch_size", batch_size), ("accumulate", accumulate), ("world_size", world_size)):
        if not isinstance(value, int) or value < 1:
            raise JobError(f"{setting}: {value!r}, a whole number of at least 1 is expected")
    if not 0 <= rank < world_size:
        raise JobError(f"rank: {rank} is not one of {world_size}")


class Order(Protocol):
    """The indices of an epoch: a tensor, or what computes them slice by slice (see ``order.py``)."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Spans:
    """The shares of a process in a full global batch and in the last one of an epoch, as ``cuts`` gives them."""

    full: list[tuple[int, int, int]]
    last: list[tuple[int, int, int]]
