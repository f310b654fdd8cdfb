"""Which samples make a global batch, and which of them a process gets.

Global batch k of an epoch is ``order[k*B : (k+1)*B]``, whatever the number of processes. It is cut
in micro-batches, each of them in shares, always as evenly as can be and the larger first. With B =
10, two micro-batches, three ranks::

    order     | 4 9 0 7 2 | 5 1 8 3 6 |
    rank 0    | 4 9       | 5 1       |
    rank 1    |     0 7   |     8 3   |
    rank 2    |         2 |         6 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lockstep.errors import InputError, JobError
from lockstep.launch.world import World
from lockstep.tensors.pytree import named_parts, parts, tensors
from lockstep.tensors.rows import (
    are_batches,
    batch_size_of,
    cut,
    holds_samples,
    joined,
    share_sizes,
)
from lockstep.tensors.seeding import kept_state_on, seed_on

T = TypeVar("T")

_MASK = (1 << 64) - 1

_AT_ONCE = 256
"""Batches whose views are made by one operation: enough to hide its cost, few enough to start an
epoch at once.
"""

_INDICES_AT_ONCE = 1 << 16
"""Indices that an order is asked for at once, where one batch has fewer: 4 ms of computing,
where it is computed.
"""

TRAINING, EVALUATION, ORDER, COLLATE, MAP = 1, 2, 3, 4, 5
"""Streams of random numbers of one seed, which must not meet."""


def absorbed(state: int, number: int) -> int:
    """A 64-bit state that has taken in one more number (the finaliser of splitmix64 over their
    sum).

    Every bit of the number moves every bit of the state, which a linear formula such as ``seed +
    1000 * epoch + index`` does not: there, two epochs share most of their streams.
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
        collate: gives inputs and targets of other samples of the epoch, by their indices, a pair
            for each list of them; None where nobody can.
    """

    parts: list[Part]
    size: int
    index: int
    epoch: int
    samples: Tensor | None = None
    shares: list[list[Part]] | None = None
    collate: Callable[[Sequence[Sequence[int]]], tuple[list[Any], str | None]] | None = None

    def __iter__(self) -> Iterator[Any]:
        full = [part for part in self.parts if part.size]
        if len(full) > 1:
            raise JobError(
                f"accumulate: this batch has {len(full)} micro-batches: give it whole to the "
                "step: step(batch)"
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

    Attributes:
        ranks: whose shares are wanted.

    Raises:
        JobError: a setting is wrong.
    """

    def __init__(self, batch_size: int, accumulate: int, rank: int | None, world_size: int) -> None:
        for setting, value in (
            ("batch_size", batch_size),
            ("accumulate", accumulate),
            ("world_size", world_size),
        ):
            if not isinstance(value, int) or value < 1:
                raise JobError(f"{setting}: {value!r}, a whole number of at least 1 is expected")
        if rank is not None and not 0 <= rank < world_size:
            raise JobError(f"rank: {rank} is not one of {world_size}")
        self.batch_size = batch_size
        self.world_size = world_size
        self.rank = rank
        self.ranks = range(world_size) if rank is None else (rank,)
        self._accumulate = accumulate
        self._of_full = self._spans(batch_size)

    def spans(self, size: int) -> list[tuple[int, int, int]]:
        """Return the wanted shares of a global batch of ``size`` samples: (start, end, samples of
        the micro-batch).

        Rank by rank, and for each of them micro-batch by micro-batch. Micro-batches without samples
        (where there are fewer samples than micro-batches) are left out.
        """
        return self._of_full if size == self.batch_size else self._spans(size)

    def _spans(self, size: int) -> list[tuple[int, int, int]]:
        found = []
        for rank in self.ranks:
            start = 0
            for micro in share_sizes(size, self._accumulate):
                sizes = share_sizes(micro, self.world_size)
                mine = start + sum(sizes[:rank])
                if micro:
                    found.append((mine, mine + sizes[rank], micro))
                start += micro
        return found

    def row(self, samples: Tensor) -> tuple[Tensor, ...]:
        """Return the indices of a global batch, then those of each wanted share."""
        return samples, *(samples[a:b] for a, b, _ in self.spans(len(samples)))

    def rows(self, order: Order, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the row of each global batch from number ``start`` on; the order is asked for in
        blocks of some batches.
        """
        full = len(order) // self.batch_size
        at_once = max(1, min(_AT_ONCE, _INDICES_AT_ONCE // self.batch_size))
        for first in range(start, full, at_once):
            block = order[first * self.batch_size : min(first + at_once, full) * self.batch_size]
            block = block.view(-1, self.batch_size)
            yield from zip(
                block.unbind(), *(block[:, a:b].unbind() for a, b, _ in self._of_full), strict=True
            )
        last = order[full * self.batch_size :]
        if len(last) and start <= full:
            yield self.row(last)

    def by_rank(self, shares: Sequence[T]) -> list[list[T]]:
        """Put together what there is of each wanted share (in the order of ``spans``) by ranks."""
        each = len(shares) // len(self.ranks)
        return [list(shares[i : i + each]) for i in range(0, len(shares), each)]

    def batch(
        self, row: tuple[Tensor, ...], pairs: Iterable[tuple[Any, Any]], index: int, epoch: int
    ) -> Batch:
        """Return the batch of a row, with the inputs and targets of each share that isn't empty."""
        samples = row[0]
        made = iter(pairs)
        parts = []
        for share, (start, end, of) in zip(row[1:], self.spans(len(samples)), strict=True):
            inputs, targets = next(made) if end > start else (None, None)
            parts.append(Part(inputs, targets, end - start, of, share))
        batch = Batch(parts, len(samples), index, epoch, samples)
        if self.rank is None:
            batch.shares = self.by_rank(parts)
            batch.parts = [Part(None, None, part.of, part.of) for part in batch.shares[0]]
        return batch


def over_ranks(world: World, *numbers: int) -> list[list[int]]:
    """The whole numbers that each rank has, in rank order; every rank calls it. Quicker than any
    objects.
    """
    if world.size == 1:
        return [[*numbers]]
    every = torch.zeros(world.size, len(numbers), dtype=torch.int64)
    every[world.rank] = torch.tensor(numbers)
    found: list[list[int]] = world.all_reduce(every.to(world.exchange_device)).tolist()
    return found


def batch_of(
    inputs: Any,
    targets: Any,
    accumulate: int,
    world: World,
    refuse_gaps: Callable[[list[bool]], None],
) -> Batch:
    """Return this rank's share, which a loop of one's own gives, as a Batch.

    Every rank calls it, and learns what the others have.

    Args:
        inputs, targets: of this rank's samples; None where it has none.
        accumulate: micro-batches to cut them in.
        world: the ranks.
        refuse_gaps: called with which ranks have samples of a micro-batch, where one has none and a
            later one has.

    Raises:
        InputError: inputs and targets can't be cut together.
    """
    samples = 0 if inputs is None else batch_size_of(inputs)
    is_cut = accumulate > 1 or len(world.devices) > 1
    if is_cut or world.size > 1:
        _refuse_lists_of_samples(inputs, samples)
    if is_cut:
        refuse_uncut(inputs, targets, samples)
    parts = []
    start = 0
    for size in share_sizes(samples, accumulate):
        if not size:
            parts.append(Part(None, None, 0, 0))
            continue
        if size < samples:
            some, wanted = cut((inputs, targets), start, size, samples)
            parts.append(Part(some, wanted, size, size))
        else:
            parts.append(Part(inputs, targets, size, size))
        start += size
    sizes = [theirs for (theirs,) in over_ranks(world, samples)]
    if world.size > 1:
        _count_over_ranks(parts, sizes, refuse_gaps)
    return Batch(parts, sum(sizes), 0, 0)


def _count_over_ranks(
    parts: list[Part], sizes: list[int], refuse_gaps: Callable[[list[bool]], None]
) -> None:
    """Set the samples of each micro-batch, all ranks together."""
    every = [share_sizes(samples, len(parts)) for samples in sizes]
    for part, shares in zip(parts, zip(*every, strict=True), strict=True):
        here = [size > 0 for size in shares]
        # A number below that of the ranks says that some have none; these are the last ones
        # wherever it matters.
        part.of = sum(shares) if all(here) else sum(here)
        if not all(here[: sum(here)]):
            refuse_gaps(here)


def refuse_uncut(inputs: Any, targets: Any, samples: int) -> None:
    """Refuse a batch that can't be cut in samples, whatever the samples of a later batch are.

    Raises:
        InputError: a tensor has neither a row for each sample nor one for all, or a list of
            targets may be either of two things.
    """
    if samples > 1:
        _refuse_uncut("inputs", inputs, samples)
        _refuse_uncut("targets", targets, samples)


def _refuse_uncut(name: str, nest: Any, samples: int) -> None:
    if isinstance(nest, Tensor):
        if nest.dim() and nest.shape[0] not in (1, samples):
            raise InputError(
                f"{name}: a tensor of shape {tuple(nest.shape)} cannot be cut into {samples} "
                "samples: the first dimension must be the batch (batch_first=True, or transpose "
                "inside of the model), or 1 where all samples share the tensor"
            )
        return
    if isinstance(nest, list | tuple) and holds_samples(nest, samples):
        return
    is_list_of_targets = type(nest) is list and name.startswith("targets")
    if is_list_of_targets and len(nest) == samples and are_batches(nest, samples):
        raise InputError(
            f"{name}: a list of {samples} items, whose tensors have {samples} rows each, for "
            f"{samples} samples can be cut in two ways: give several targets of all samples as a "
            "tuple, and those of each sample as a list of dictionaries"
        )
    for key, part in named_parts(nest):
        _refuse_uncut(f"{name}.{key}", part, samples)


def _refuse_lists_of_samples(inputs: Any, rows: int) -> None:
    """Refuse a list with an item for each sample as inputs: nobody can see that it is one.

    Raises:
        InputError: with what to do instead.
    """
    for one in (inputs, *(parts(inputs) or ())):
        if type(one) is not list or len(one) == rows:
            continue
        if any(t.dim() and t.shape[0] not in (1, rows) for t in tensors(one)):
            raise InputError(
                f"inputs: a list of {len(one)} items, whose tensors have unequal numbers of rows, "
                "cannot be cut: pad the samples to one tensor, or train by a Job, whose collate "
                "may give such a list; several inputs of all samples are a tuple"
            )


@contextlib.contextmanager
def own_stream(world: World, seed: int) -> Iterator[None]:
    """Random numbers of this rank's own for a step.

    A script seeds all ranks alike, so that they agree on what it draws; masks must differ all the
    same.
    """
    if world.size == 1:
        yield
        return
    mine = mixed(seed, world.step + 1, world.rank)
    with contextlib.ExitStack() as kept:
        for device in {torch.device("cpu"), *(device.torch for device in world.devices)}:
            kept.enter_context(kept_state_on(device))
            seed_on(device, mine)
        yield


class Order(Protocol):
    """The indices of an epoch: a tensor, or what computes them slice by slice (see
    ``order.py``).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Tensor: ...


def mixed_share(shares: list[Part]) -> Part:
    """As many samples as the first share has (two, if it has one), some of it and some of the
    second one.

    So they show what is alike within each share only, lengths say. Where shares can't be joined, it
    is the first one.
    """
    first, *others = shares
    if not others or not others[0].size or not first.size:
        return first
    second = others[0]
    some = (first.size + 1) // 2
    more = min(max(1, first.size - some), second.size)
    one, other = (first.inputs, first.targets), (second.inputs, second.targets)
    held = list(tensors(one))
    if not held or any(t.is_nested or (t.dim() and len(t) != first.size) for t in held):
        return first  # what isn't cut can't be joined
    head = cut(one, 0, some, first.size)
    both = joined(head, some, cut(other, 0, more, second.size), more)
    return first if both is None else Part(both[0], both[1], some + more, some + more)
