"""The batches of one epoch that a training makes updates of, and why they end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lockstep.data import Batch
from lockstep.training.progress import TrainingProgress
from lockstep.training.setup import Setup


class EpochBatches:
    """The batches of an epoch that are still to come, up to where all ranks stop together.

    They end with the epoch, at the last step, where something has stopped the training, or where a
    signal asks for it.

    Args:
        setup: what is trained.
        progress: decides where the batches end; a signal is noted in it.
        batches: the rest of the epoch.
    """

    def __init__(
        self,
        setup: Setup,
        progress: TrainingProgress,
        batches: Iterator[Batch],
    ) -> None:
        self._setup = setup
        self._progress = progress
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        progress = self._progress
        step = self._setup.step
        # Ranks that compare what they read wait for one another, so none may leave before the
        # others.
        length = self._setup.loader.batches_of(progress.epoch)
        may_stop = step.together or length is not None

        while not progress.is_at_last_step:
            batch = next(self._batches, None)
            if batch is None:
                break
            yield batch
            if step.stopping and may_stop:
                break

        if not step.together:
            yield from self._up_to_the_others()
        progress.interrupted = step.stopping

    def _up_to_the_others(self) -> Iterator[Batch]:
        """Yield the batches up to the rank that went furthest.

        Ranks that don't meet in their updates learn of a stop at different batches.
        """
        progress = self._progress
        step = self._setup.step
        place = progress.position, step.stopping, progress.stopped
        places = self._setup.world.gather_objects(place)
        furthest = max(position for position, _, _ in places)
        yield from itertools.islice(self._batches, furthest - progress.position)
        step.stopping = any(stopping for _, stopping, _ in places)
        progress.stopped = next((stopped for _, _, stopped in places if stopped), "")

    def have_ended(self) -> bool:
        """Return whether the epoch has come to its end, and not only the training."""
        progress = self._progress
        if progress.interrupted:
            return False
        if not progress.is_at_last_step:
            return True

        length = self._setup.loader.batches_of(progress.epoch)
        if length is None:  # only another batch would show that
            return next(self._batches, None) is None
        return progress.position >= length
