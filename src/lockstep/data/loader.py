"""The loader: this process's share of every global batch, epoch by epoch."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lockstep.data.copy_ahead import copied_ahead
from lockstep.data.costs import costs_of
from lockstep.data.dataset_state import state_of
from lockstep.data.fetch import Collate, Fetcher, number_of
from lockstep.data.loader_workers import Workers, workers_here
from lockstep.data.order import by_person, listed, permutation
from lockstep.data.shares import Batch, Cutting, Row, over_ranks
from lockstep.errors import JobError, RunError
from lockstep.launch import world as _world
from lockstep.launch.world import World
from lockstep.tensors.pytree import may_pin

_KEPT = 4
"""States that are kept: of the batch in use, of one that is copied ahead, and of one that shows
whether more come.
"""

_COMPARED = 64
"""Samples whose costs are compared between ranks."""


class AnyLoader(ABC):
    """Goes through a dataset, and gives this process's share of each global batch.

    Global batch k of epoch e is the same set of samples for any number of processes.

    Args:
        dataset: map-style, or a stream, of ``(inputs, targets)``.
        batch_size: samples of the *global* batch.
        rank: this process's number; None where one process drives all ``world_size`` devices: its
            batches have ``shares``, each put together as by a rank. (Cutting a whole batch
            afterwards would have to guess which of its tensors and lists have a row for each
            sample.)
        world_size: how many processes, or devices of the one process, share each batch.
        shares: the sizes of their local batches, in proportion, as ``(3, 1)``; none is even.
        accumulate: micro-batches that each global batch is cut in.
        seed: of the order and of the samples' random numbers.
        shuffle: a permutation from (seed, epoch); otherwise the dataset's own order. A stream isn't
            shuffled.
        order: ``order(epoch)`` gives the indices of an epoch instead. It is called under a seed
            made of (seed, epoch), so that every process gets the same. A stream has none.
        batches: ``batches(epoch)`` gives the global batches of an epoch, each a list of indices;
            ``batch_size`` isn't used then. A stream has none.
        cut_by: the cost of each sample, or a function of its index: local batches and micro-batches
            have like costs, not like numbers of samples. A stream has none.
        collate: makes (inputs, targets) of a list of samples; None is PyTorch's default.
        workers: loader workers for each rank or device; None chooses by the cores and the dataset.
            A stream has at most one: a second one would read the whole stream too.
        device: an accelerator to which batches are copied ahead, or those of all shares, or of all
            stages; None, or the CPU, leaves them where they are.
        evaluation: samples draw their random numbers from a stream of their own.
        name: the job's field, for messages; None is ``train_data`` or ``eval_data``.

    Attributes:
        samples: of an epoch (the first, where the person's order gives epochs of different
            lengths); of a stream None until it has been gone through.

    Raises:
        JobError: a setting is wrong, or the dataset is empty.
    """

    samples: int | None

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int | None = 0,
        world_size: int = 1,
        shares: Sequence[int] = (),
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: Callable[[int], Any] | None = None,
        batches: Callable[[int], Iterable[Any]] | None = None,
        cut_by: Any = None,
        collate: Collate | None = None,
        workers: int | None = None,
        device: torch.device | Sequence[torch.device] | None = None,
        evaluation: bool = False,
        name: str | None = None,
    ) -> None:
        self._cutting = Cutting(batch_size, accumulate, rank, world_size, shares)
        if order is not None and batches is not None:
            raise JobError("order: batches gives the order of samples, too: leave order out")

        self._name = name or ("eval_data" if evaluation else "train_data")
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._by_person = order
        self._lists_by_person = batches
        self._cut_by = cut_by
        self._evaluation = evaluation
        self._making = {
            "seed": seed,
            "evaluation": evaluation,
            "collate": collate,
            "name": self._name,
        }

        places = [device] if isinstance(device, torch.device) else list(device or ())
        self._places = [] if any(place.type == "cpu" for place in places) else places
        self._pin = bool(self._places) and may_pin(self._places[0])

        self._count = self._count_of_workers(workers)
        self._fetching = self._fetcher()
        self._workers: Workers | None = None
        self._are_stale = bool(self._count)
        self._states: dict[tuple[int, int], Any] | None = None  # by epoch and position
        self._next = 0

    @abstractmethod
    def _fetcher(self) -> Any:
        """Return what makes samples by this dataset and these settings; loader workers hold a
        copy.
        """

    def _count_of_workers(self, wanted: int | None) -> int:
        """Return the number of loader workers of this process."""
        readers = len(self._cutting.ranks)
        if wanted is None:
            wanted = workers_here(
                self._dataset,
                _world.current(),
                readers=readers,
                on_accelerator=bool(self._places),
            )

        return wanted * readers

    @abstractmethod
    def batches_of(self, epoch: int) -> int | None:
        """Return the number of global batches of this epoch; None for a stream, whose length isn't
        known.
        """

    def __iter__(self) -> Iterator[Batch]:
        """Go through the next epoch: the first time epoch 0."""
        self._next += 1
        return self.epoch(self._next - 1)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's share of the batches of an epoch, from global batch ``start`` on.

        Raises:
            JobError: the person's order gives indices that don't exist, a sample isn't a pair, or a
                stream is empty.
            JobError, RunError: ranks read different streams, or one can't be iterated a second
                time.
            SampleError: a sample raised; its index is named.
        """
        batches = self._batches(epoch, start)
        return copied_ahead(batches, self._places) if self._places else batches

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches where they were made, on the CPU or where the dataset is."""

    def keep_states(self) -> None:
        """From now on keep the dataset's state after each of the last batches: they may be read
        ahead of their use.
        """
        self._states = {}

    def state_at(self, epoch: int, position: int) -> Any:
        """Return the dataset's state before global batch ``position`` of an epoch; None where
        that isn't known.
        """
        return None if self._states is None else self._states.get((epoch, position))

    def _keep(self, epoch: int, position: int, state: Any) -> None:
        """Keep the dataset's state before a global batch, and forget the oldest one."""
        if self._states is None:
            return

        self._states[epoch, position] = state
        if len(self._states) > _KEPT:
            oldest = next(iter(self._states))
            del self._states[oldest]

    def _answers(self, requests: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield what ``_fetching`` gives for each request, here or in loader workers, which are
        asked ahead.
        """
        if self._are_stale:
            self.close()
            self._workers = Workers(self._fetching, self._count, self._pin)
            self._are_stale = False

        if self._workers is not None:
            return self._workers.fetch(requests)
        return (self._fetching(*request) for request in requests)

    def _world_to_compare(self) -> World | None:
        """Return the ranks that share these batches, where there are several."""
        world = _world.current()
        if world is None or world.size == 1 or world.size != self._cutting.world_size:
            return None
        return world

    def renew_workers(self) -> None:
        """Have the next epoch fetched by new loader workers: the dataset may have been changed
        in this process.
        """
        self._are_stale = bool(self._count)

    def close(self) -> None:
        """End the loader workers, where there are any."""
        if self._workers is not None:
            self._workers.close()


class Loader(AnyLoader):
    """The loader of a map-style dataset."""

    _fetching: Fetcher

    def _fetcher(self) -> Fetcher:
        self._length = len(self._dataset)
        if not self._length:
            raise JobError(f"{self._name}: it is empty")
        if self._cut_by is not None:
            self._cutting.costs = costs_of(self._cut_by, self._length)

        self._held: tuple[int, Any] | None = None  # the last epoch asked for
        order = self._order(0)
        self.samples = len(order) if self._lists_by_person is None else sum(map(len, order))
        self._first = self._number_in(order)
        fetcher = Fetcher(self._dataset, pin=self._pin and not self._count, **self._making)
        if fetcher.tensors is not None and {t.device for t in fetcher.tensors} == set(self._places):
            self._places = []
        return fetcher

    def __len__(self) -> int:
        """Return the number of global batches of an epoch (the first)."""
        return self._first

    def batches_of(self, epoch: int) -> int | None:
        """Return the number of global batches of this epoch: the person's function may give epochs
        of different lengths.
        """
        return self._number_in(self._order(epoch)) if self._is_by_person else self._first

    def _number_in(self, order: Any) -> int:
        """Return the number of global batches of an order."""
        if self._lists_by_person is not None:
            return len(order)
        return -(-len(order) // self._cutting.batch_size)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch) and not self._evaluation:
            set_epoch(epoch)
            self.renew_workers()

        if self._cutting.costs is not None:
            some = torch.arange(0, self._length, -(-self._length // _COMPARED))
            self._compare("cut_by: the costs", self._cutting.costs(some), "sample")

        # Loader workers are asked ahead of what is used.
        rows, asked = itertools.tee(self._rows(epoch, start))
        by_tensors = self._fetching.tensors is not None and not self._count
        requests = (
            (epoch, [share if by_tensors else share.tolist() for share in shares if len(share)])
            for _, _, *shares in asked
        )
        collate = functools.partial(self._fetching.with_parts, epoch)
        answers = zip(rows, self._answers(requests), strict=True)
        for index, (row, pairs) in enumerate(answers, start):
            if self._states is not None:
                state = state_of(self._dataset)
                self._keep(epoch, index + 1, state)
                if index + 1 == self.batches_of(epoch):
                    self._keep(epoch + 1, 0, state)

            batch = self._cutting.batch(row, pairs, index, epoch)
            batch.collate = collate
            yield batch

    def _rows(self, epoch: int, start: int) -> Iterator[Row]:
        """Return the row of each global batch from number ``start`` on."""
        order = self._order(epoch)
        if self._is_by_person:
            setting = "order" if self._lists_by_person is None else "batches"
            self._compare(f"{setting}: for epoch {epoch} the indices", order, "epoch")
        if self._lists_by_person is None:
            return self._cutting.rows(order, start)
        if len(order) < start:
            raise RunError(
                f"batches: for epoch {epoch} it gave {len(order)} batches, but the run had used "
                f"{start}: they must depend on the epoch only"
            )
        return map(self._cutting.row, order[start:])

    @property
    def _is_by_person(self) -> bool:
        return self._by_person is not None or self._lists_by_person is not None

    def _order(self, epoch: int) -> Any:
        """Return the indices of an epoch, or those of each batch; the last one asked for is kept.

        Raises:
            JobError: the person's can't be.
        """
        if self._held is None or self._held[0] != epoch:
            self._held = None  # a long one goes before the next comes
            self._held = epoch, self._new_order(epoch)
        return self._held[1]

    def _new_order(self, epoch: int) -> Any:
        if self._lists_by_person is not None:
            return listed(self._lists_by_person, self._length, self._seed, epoch)
        if self._by_person is not None:
            return by_person(self._by_person, self._length, self._seed, epoch)
        if self._shuffle:
            return permutation(self._length, self._seed, epoch)
        return torch.arange(self._length)

    def _compare(self, what: str, by_person: Any, of: str) -> None:
        """Raise on every rank where the person doesn't give the same on all of them.

        Args:
            what: begins a message.
            by_person: what the person's function gives.
            of: what it may depend on.
        """
        world = self._world_to_compare()
        if world is None:
            return

        numbers = over_ranks(world, number_of(by_person) >> 1)
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise JobError(
                    f"{what} on rank {rank} differ from those on rank 0: they must depend on the "
                    f"{of} only",
                    kind="sampler",
                    fix="draw from torch's, random's or numpy's global generator, which are seeded",
                )
