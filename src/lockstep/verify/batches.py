"""Batches: those of a job that both sides train on: the first ones, the smaller last one, and those
of another kind.

::

    epoch 0   | 0 | 1 | ..... | k | ... | last, smaller |     where the job has a smaller last batch
    epoch 1   | 0 | 1 |

k stands for up to three batches whose targets differ in kind from the others: a mask, a rare class,
NaN. The first of epoch 1 shows the update after the smaller batch. Of each evaluation set the
batches are 0, 1 and the last.

They come from the job's own loader in its own order. A stream, which can't be skipped through, is
taken to end after two and a half batches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data import AnyLoader, Batch, is_stream
from lockstep.tensors.pytree import holds_packed, named_tensors
from lockstep.tensors.rows import has_rows

EPOCHS = 2


def places_of(
    loader: AnyLoader, batch_size: int, epoch: int, more: Collection[int] = ()
) -> list[int]:
    """The numbers of the batches of the course in an epoch, with ``more`` in the first one."""
    batches = loader.batches_of(epoch)
    if batches is None:  # a stream that ends early: all of it, but no more than is wanted
        return [0, 1, 2] if epoch == 0 else [0, 1]
    assert loader.samples is not None
    wanted = {0, 1}
    if epoch == 0:
        wanted |= {*more, batches - 1} if loader.samples % batch_size else {*more}
    return sorted(place for place in wanted if place < batches)


def evaluated_places(loader: AnyLoader) -> list[int]:
    """The numbers of the batches of an evaluation set: the first two and the last."""
    batches = loader.batches_of(0)
    return [0, 1, 2] if batches is None else sorted({0, min(1, batches - 1), batches - 1})


class Excerpt:
    """Some batches of a loader, by their numbers in order, as a loader."""

    def __init__(self, loader: AnyLoader, places: list[int]) -> None:
        self._loader = loader
        self._places = places

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Give the batches of an epoch; what lies between is skipped, not fetched."""
        runs = itertools.groupby(enumerate(self._places), key=lambda pair: pair[1] - pair[0])
        for _, run in runs:
            neighbours = [place for _, place in run]
            yield from itertools.islice(self._loader.epoch(epoch, neighbours[0]), len(neighbours))


def begun(dataset: Any, batch_size: int) -> Any:
    """A dataset as it is; of a stream the first two and a half batches."""
    if not is_stream(dataset):
        return dataset
    return _Begun(dataset, 2 * batch_size + (batch_size + 1) // 2)


class _Begun(torch.utils.data.IterableDataset[Any]):
    """The first ``samples`` of a stream."""

    def __init__(self, stream: Any, samples: int) -> None:
        self._stream = stream
        self._samples = samples
        self.draws_random = getattr(stream, "draws_random", True)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the stream, if it has a method for it."""
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._samples)


_MOST = 3
"""Batches that are taken beside."""

_FEW = 32
"""Different whole numbers in a batch, up to which each is looked at."""

Trait = tuple[str, Any, Any]


def others_in_kind(loader: AnyLoader, taken: Collection[int], seconds: float) -> tuple[int, ...]:
    """Find batches of the first epoch whose targets have a trait that no batch ``taken`` has.

    As many batches are looked at as take so many seconds. The numbers of those found begin with
    the most different.
    """
    end = time.perf_counter() + seconds
    found: list[set[Trait]] = []
    for batch in loader.epoch(0):
        full = [part for part in batch.parts if part.size]
        found.append(set().union(*(traits(part.targets, part.size) for part in full)))
        if time.perf_counter() > end:
            break
    known = set().union(*(found[number] for number in taken if number < len(found)))
    chosen: list[int] = []
    while len(chosen) < _MOST:
        news = [len(its - known) for its in found]
        best = news.index(max(news))
        if not news[best]:
            break
        chosen.append(best)
        known |= found[best]
    return tuple(chosen)


def traits(targets: Any, size: int) -> set[Trait]:
    """What the targets of ``size`` samples show: how often NaN and the extremes come, and rare
    numbers.
    """
    found: set[Trait] = set()
    for name, tensor in () if holds_packed(targets) else named_tensors(targets):
        if not has_rows(tensor, size) or not tensor.numel() or tensor.is_complex():
            continue
        rows = tensor.reshape(size, -1).double()
        missing = rows.isnan()
        found.add((name, "NaN", _spread(missing)))
        if bool(missing.all()):
            continue
        lowest, highest = rows[~missing].aminmax()
        found.add((name, "lowest", _spread(rows == lowest)))
        found.add((name, "highest", _spread(rows == highest)))
        values = () if tensor.is_floating_point() else torch.unique(tensor).tolist()
        if len(values) <= _FEW:
            found |= {(name, "value", value) for value in values}
    return found


def _spread(hits: Tensor) -> str:
    """How hits are spread over the samples of a batch."""
    each = hits.sum(dim=1)
    if int(each.sum()) <= 1:
        return "at most once"
    return "evenly" if bool((each == each[0]).all()) else "unevenly"
