"""Batches: those of a job that both sides train on: the first ones, and the smaller last one.

::

    epoch 0   | 0 | 1 | ............. | last, smaller |      where the job has a smaller last batch
    epoch 1   | 0 | 1 |

The first of epoch 1 shows the update after the smaller batch. Of each evaluation set the batches are 0, 1 and the last.

They come from the job's own loader in its own order. A stream, which can't be skipped through, is taken to end after
two and a half batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.data import AnyLoader, Batch, is_stream

EPOCHS = 2


def places_of(loader: AnyLoader, batch_size: int, epoch: int) -> list[int]:
    """The numbers of the batches of the course in an epoch."""
    batches = loader.batches_of(epoch)
    if batches is None:  # a stream that ends early: all of it, but no more than is wanted
        return [0, 1, 2] if epoch == 0 else [0, 1]
    assert loader.samples is not None
    ends_smaller = epoch == 0 and loader.samples % batch_size > 0
    return sorted(place for place in {0, 1, *([batches - 1] if ends_smaller else [])} if place < batches)


def evaluated_places(loader: AnyLoader) -> list[int]:
    """Those of an evaluation set: the first two and the last."""
    batches = loader.batches_of(0)
    return [0, 1, 2] if batches is None else sorted({0, min(1, batches - 1), batches - 1})


class Excerpt:
    """Some batches of a loader, as a loader.

    Args:
        loader: of one side.
        places: the numbers of the batches, in order.
    """

    def __init__(self, loader: AnyLoader, places: list[int]) -> None:
        self._loader, self._places = loader, places

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Those of an epoch; what lies between is skipped, not fetched."""
        for _, run in itertools.groupby(enumerate(self._places), key=lambda pair: pair[1] - pair[0]):
            neighbours = [place for _, place in run]
            yield from itertools.islice(self._loader.epoch(epoch, neighbours[0]), len(neighbours))


def begun(dataset: Any, batch_size: int) -> Any:
    """A dataset as it is; of a stream the first two and a half batches."""
    return _Begun(dataset, 2 * batch_size + (batch_size + 1) // 2) if is_stream(dataset) else dataset


class _Begun(torch.utils.data.IterableDataset[Any]):
    """The first ``samples`` of a stream."""

    def __init__(self, stream: Any, samples: int) -> None:
        self._stream, self._samples = stream, samples
        self.draws_random = getattr(stream, "draws_random", True)

    def set_epoch(self, epoch: int) -> None:
        """Told to the stream, where it wants to know."""
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._samples)
