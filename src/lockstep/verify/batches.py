"""Batches: those of a job that both sides train on: the first ones, and the smaller last one.

::

    epoch 0   | 0 | 1 | ........... | last, smaller |     where the job has a smaller last batch
    epoch 1   | 0 | 1 |

The first of epoch 1 shows the update after the smaller batch. Of each evaluation set the batches
are 0, 1 and the last.

They come from the job's own loader in its own order. Of a stream, which can't be skipped through,
they are the first two of each epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lockstep.data import AnyLoader, Batch
from lockstep.job import Job

EPOCHS = 2


def places_of(loader: AnyLoader, job: Job, epoch: int) -> list[int]:
    """Return the numbers of the batches of an epoch that both sides train on."""
    batches = loader.batches_of(epoch)
    if batches is None:
        return [0, 1]

    assert loader.samples is not None
    wanted = {0, 1}
    has_other_sizes = job.batches is not None or loader.samples % job.batch_size
    if epoch == 0 and has_other_sizes:
        wanted.add(batches - 1)
    return sorted(place for place in wanted if place < batches)


def evaluated_places(loader: AnyLoader) -> list[int]:
    """Return the numbers of the batches of an evaluation set: the first two and the last."""
    batches = loader.batches_of(0)
    if batches is None:
        return [0, 1]
    last = batches - 1
    return sorted({0, min(1, last), last})


class Excerpt:
    """Some batches of a loader, by their numbers in order, as a loader."""

    def __init__(self, loader: AnyLoader, places: list[int]) -> None:
        self._loader = loader
        self._places = places

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Give the batches of an epoch; what lies between is skipped, not fetched."""
        runs: list[list[int]] = []
        for place in self._places:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])

        for run in runs:
            batches = self._loader.epoch(epoch, run[0])
            yield from itertools.islice(batches, len(run))
