"""The loader: this process's share of every global batch, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.fetch import Collate, Fetcher
from lockstep.data.loader_workers import Workers, default_workers, free_cores
from lockstep.data.order import Orders, Places, numbered
from lockstep.data.prefetch import copied_ahead
from lockstep.data.shares import Batch, Order, Part, Spans, checked_cutting, cuts, pieces
from lockstep.data.source import is_stream, resolve, same_on_every_rank
from lockstep.data.stream import StreamLoader
from lockstep.errors import JobError
from lockstep.launch import here
from lockstep.launch import world as _world
from lockstep.launch.events import Line
from lockstep.launch.world import World


class Loader:
    """Global batch k of epoch e is the same set of samples for any number of processes; here is one process's share.

    Args:
        dataset: map-style, of ``(inputs, targets)``.
        batch_size: samples of the *global* batch.
        rank: this process's number.
        world_size: how many processes share each batch.
        accumulate: micro-batches that each global batch is cut in.
        seed: of the order and of the samples' random numbers.
        shuffle: a permutation from (seed, epoch); otherwise the dataset's own order.
        order: ``order(epoch)`` gives the indices of an epoch instead. It is called under a seed made of (seed, epoch),
            so that every process gets the same.
        collate: makes (inputs, targets) of a list of samples; None is PyTorch's default.
        workers: loader workers of this process; None chooses by the cores and the dataset.
        device: an accelerator to which batches are copied ahead; None, or the CPU, leaves them where they are.
        evaluation: samples draw their random numbers from a stream of their own.
        pin: copy through pinned memory; None does so for CUDA and XPU.
        name: the job's field, for messages; None is ``train_data`` or ``eval_data``.
        orders: those of another loader of the same dataset, to have them computed once.

    Raises:
        JobError: a setting is wrong, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int = 0,
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
        orders: Orders | None = None,
    ) -> None:
        checked_cutting(batch_size, accumulate, rank, world_size)
        if order is not None and not callable(order):
            raise JobError(f"order: a function of the epoch is expected, not a {type(order).__name__}")
        self._name = name or ("eval_data" if evaluation else "train_data")
        self._length = len(dataset)
        if not self._length:
            raise JobError(f"{self._name}: it is empty")
        self._batch_size, self._rank, self._world_size, self._accumulate = batch_size, rank, world_size, accumulate
        self._by_person = order
        self.orders = orders or Orders(self._length, seed=seed, shuffle=shuffle, by_person=order)
        self._fetcher = Fetcher(dataset, seed=seed, evaluation=evaluation, collate=collate, name=self._name)
        self._device = None if device is None or device.type == "cpu" else device
        self._pin = self._device is not None and (self._device.type in ("cuda", "xpu") if pin is None else pin)
        if workers is None:
            world = _world.current()
            workers = default_workers(len(free_cores()), world.local_size if world else 1, dataset)
        if workers < 0:
            raise JobError(f"loader_workers: {workers}, a whole number from 0 is expected")
        self._workers = Workers(self._fetcher, workers, self._pin) if workers else None
        self._next = 0
        self._said = False

    @property
    def samples(self) -> int:
        """Samples of an epoch (the first, where the person's order gives epochs of different lengths)."""
        return self._length if self._by_person is None else len(self.orders(0))

    def __len__(self) -> int:
        """Global batches of an epoch (the first)."""
        return -(-self.samples // self._batch_size)

    def batches_of(self, epoch: int) -> int:
        """Global batches of this epoch, where the person's order gives epochs of different lengths."""
        return len(self) if self._by_person is None else -(-len(self.orders(epoch)) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch: the first time epoch 0."""
        self._next += 1
        return self.epoch(self._next - 1)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from global batch ``start`` on.

        Raises:
            JobError: the person's order gives indices that don't exist; a sample isn't a pair.
            SampleError: a sample raised; its index is named.
        """
        batches = self._batches(epoch, start)
        return batches if self._device is None else copied_ahead(batches, self._device, self._pin)

    def close(self) -> None:
        """End the loader workers, where there are any."""
        if self._workers is not None:
            self._workers.close()

    def _compare(self, epoch: int, order: Order) -> None:
        """Make sure that the person's order is the same on every rank.

        Raises:
            JobError: it isn't; every rank raises.
        """
        world = _world.current()
        if self._by_person is None or world is None or world.size == 1 or world.size != self._world_size:
            return
        device = torch.device("cpu") if world.backend == "gloo" else world.device.torch
        every = torch.zeros(world.size, dtype=torch.int64)
        every[world.rank] = numbered(order)
        numbers = world.all_reduce(every.to(device)).tolist()
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise JobError(
                    f"order: for epoch {epoch} it gave other indices on rank {rank} than on rank 0: it has to depend "
                    "on the epoch alone",
                    kind="sampler",
                    fix="draw from torch's, random's or numpy's global generator, which are seeded",
                )

    # ---- three ways to fetch ----------------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.orders(epoch)
        self._compare(epoch, order)
        last = len(order) % self._batch_size
        spans = Spans(
            cuts(self._batch_size, self._accumulate, self._rank, self._world_size),
            cuts(last, self._accumulate, self._rank, self._world_size) if last else [],
        )
        full = len(order) // self._batch_size
        rows = pieces(order, self._batch_size, spans, start)
        if self._workers is None and self._fetcher.tensors is not None:
            yield from self._of_tensors(epoch, start, rows, order, spans)
            return
        wanted = pieces(order, self._batch_size, spans, start)  # apart from `rows`: loader workers are asked ahead
        requests = ((epoch, shares) for row in wanted if (shares := [s.tolist() for s in row[1:] if len(s)]))
        fetched = (self._fetcher(*r) for r in requests) if self._workers is None else self._workers.fetch(requests)
        for index, row in enumerate(rows, start):
            pairs = iter(next(fetched) if any(map(len, row[1:])) else ())
            self._say_note()
            parts = []
            for share, (_, _, of) in zip(row[1:], spans.full if index < full else spans.last, strict=True):
                size = len(share)
                inputs, targets = next(pairs) if size else (None, None)
                parts.append(Part(inputs, targets, size, of, share))
            yield Batch(parts, len(row[0]), index, epoch, row[0])

    def _say_note(self) -> None:
        note = self._fetcher.note if self._workers is None else self._workers.note
        if note is not None and not self._said:
            self._said = True
            world = _world.current()
            if world is not None and self._rank == 0:
                world.tell(Line.note(note))

    def _of_tensors(
        self, epoch: int, start: int, rows: Iterator[tuple[Tensor, ...]], order: Order, spans: Spans
    ) -> Iterator[Batch]:
        """By indexing two tensors. The hot path of a small step: nothing here that a batch doesn't need."""
        assert self._fetcher.tensors is not None
        take = _pinned_rows if self._pin else _rows
        inputs, targets = self._fetcher.tensors
        lookup = self._fetcher.lookup
        sizes = [(b - a, of) for a, b, of in spans.full]
        full = len(order) // self._batch_size
        # Under a Subset, the places to read differ from the indices to tell.
        places = None if lookup is None else pieces(Places(lookup, order), self._batch_size, spans, start)
        for index, row in enumerate(rows, start):
            place = row if places is None else next(places)
            if index == full:
                sizes = [(b - a, of) for a, b, of in spans.last]
            parts = [
                Part(take(inputs, at), take(targets, at), size, of, share) if size else Part(None, None, 0, of, share)
                for at, share, (size, of) in zip(place[1:], row[1:], sizes, strict=True)
            ]
            yield Batch(parts, len(row[0]), index, epoch, row[0])


def _rows(tensor: Tensor, at: Tensor) -> Tensor:
    return tensor.index_select(0, at if tensor.is_cpu else at.to(tensor.device))


def _pinned_rows(tensor: Tensor, at: Tensor) -> Tensor:
    if not tensor.is_cpu:
        return _rows(tensor, at)
    out = torch.empty((len(at), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, at, out=out)


class SharedLoader:
    """For one process that drives several devices: each one's share, put together as by a rank.

    A batch has ``shares``: for each device, its part of each micro-batch. Cutting a whole batch afterwards would have
    to guess which of its tensors and lists have a row for each sample.

    Args:
        devices: how many shares.
        settings: as those of ``Loader``.
    """

    def __init__(self, dataset: Any, devices: int, **settings: Any) -> None:
        first = Loader(dataset, rank=0, world_size=devices, **settings)
        settings["orders"] = first.orders
        self._loaders = [first, *(Loader(dataset, rank=i, world_size=devices, **settings) for i in range(1, devices))]
        self.samples = self._loaders[0].samples
        self.batches_of = self._loaders[0].batches_of

    def __len__(self) -> int:
        """Global batches of an epoch (the first)."""
        return len(self._loaders[0])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from global batch ``start`` on; see ``Loader.epoch``."""
        for together in zip(*(loader.epoch(epoch, start) for loader in self._loaders), strict=True):
            first = together[0]
            wholes = [Part(None, None, part.of, part.of) for part in first.parts]
            shares = [batch.parts for batch in together]
            yield Batch(wholes, first.size, first.index, first.epoch, first.samples, shares)

    def close(self) -> None:
        """End the loader workers, where there are any."""
        for loader in self._loaders:
            loader.close()


AnyLoader = Loader | SharedLoader | StreamLoader
"""What goes through a dataset of any kind, epoch by epoch."""


def loader_of(dataset: Any, rank: int, world_size: int, devices: int = 1, **settings: Any) -> AnyLoader:
    """The loader of a process for a dataset or a stream.

    Args:
        dataset: as ``resolve`` gives it.
        rank: this process's number.
        world_size: how many processes share each batch.
        devices: how many this process drives; each gets its share where there are several.
        settings: the others are as those of ``Loader``.

    Raises:
        JobError: the ranks have other data, or a setting is wrong.
    """
    world = _world.current()
    if world is not None and world.size == world_size:
        named = settings.get("name") or ("eval_data" if settings.get("evaluation") else "train_data")
        same_on_every_rank(dataset, world, named)
    if is_stream(dataset):
        if devices > 1:
            return StreamLoader(dataset, rank=None, world_size=devices, **settings)
        return StreamLoader(dataset, rank=rank, world_size=world_size, **settings)
    if devices > 1:
        return SharedLoader(dataset, devices, **settings)
    return Loader(dataset, rank=rank, world_size=world_size, **settings)


def batches(dataset: Any, batch_size: int, **settings: Any) -> Loader | StreamLoader:
    """This process's share of every global batch, for a loop of your own.

    ::

        for inputs, targets in lockstep.batches(dataset, batch_size=256):
            step(inputs, targets)

    Each pass over the result is the next epoch. Inside ``launch``, or under torchrun, it knows the rank by itself.

    Args:
        dataset: of ``(inputs, targets)``; one that can only be gone through (a stream) isn't shuffled.
        batch_size: samples of the *global* batch.
        **settings: as those of ``Loader``.

    Raises:
        JobError: a setting is wrong, or the dataset is empty.
    """
    world = here()
    if world is not None and world.size > 1:
        device = None if world.device.is_slot else world.device.torch
        settings = {"rank": world.rank, "world_size": world.size, "device": device, **settings}
    dataset = resolve(dataset, world or World(), settings.get("name") or "train_data")
    kind = StreamLoader if is_stream(dataset) else Loader
    return kind(dataset, batch_size=batch_size, **settings)
