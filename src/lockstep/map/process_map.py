"""A function over processes: chunks of items out, results back, in order, with a bounded number of
them under way.

::

    items ──> | chunk 7 | chunk 6 |  two at most with each worker: one in work, one that waits for it
              | chunk 5 | chunk 4 | ... done, or not yet: kept until all before have been given
              | chunk 3 |  ──> results

The caller's thread does it all, when it asks for a result: nothing runs in its process meanwhile,
items are drawn from a generator where they are used, and Ctrl-C ends it as it ends any loop. Each
worker has two blocks, one for each chunk it may have: the items lie in it, then the results. A new
chunk comes only when its block was read, so nobody waits for memory.

The size of a chunk follows what the last ones took, to some hundredths of a second and some
megabytes: the hand-over of a chunk costs a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import InputError, ItemFailed, RunError, own_traceback, told
from lockstep.launch.devices import Device, occupied
from lockstep.launch.processes import failure_records
from lockstep.launch.processes.call import Setup
from lockstep.launch.processes.failure_records import Record
from lockstep.launch.processes.modes import Modes
from lockstep.launch.processes.pickling import pickled
from lockstep.launch.processes.supervisor import Supervisor
from lockstep.map.map_worker import Call, Reply, Task, failed, named, serve
from lockstep.map.shared_values import (
    first_that_cant_be_packed,
    new_block,
    pack,
    unpack,
)
from lockstep.tensors.pytree import each, own_copy
from lockstep.tensors.seeding import kept_states

_SECONDS = 0.05
"""That a chunk should take: some hundred times its hand-over, and little to wait for at the end."""

_BYTES = 4 << 20
"""Of a chunk's items or results, where one isn't larger."""

_HELD = 64 << 20
"""Bytes of results that may wait for those before them, beyond the two chunks of each worker."""

_AHEAD = 16
"""Chunks for each worker that may be under way or wait, where they are small."""

_LOOK = 1e-3
"""Seconds of a caller's time between looks at what has come."""


@dataclass(eq=False, slots=True)
class _Chunk:
    """Items on their way, or their results on theirs."""

    first: int
    units: int
    worker: int
    slot: int
    block: int
    bytes: int
    results: deque[Any] | None = None
    failure: Record | None = None


class _Pace:
    """How many items make a chunk."""

    def __init__(self) -> None:
        self.size = 1
        self._seconds = 0.0

    def learn(self, units: int, seconds: float, size: int) -> None:
        """A chunk of so many took so long, and so many bytes one way."""
        each = seconds / units
        self._seconds = (self._seconds + each) / 2 if self._seconds else each
        by_time = _SECONDS / max(self._seconds, 1e-7)
        by_size = _BYTES * units / max(size, 1)
        self.size = max(1, int(min(by_time, by_size, 8 * self.size)))


def in_this_one(call: Call, items: Iterator[Any], device: Device) -> Iterator[Any]:
    """Compute the results in the caller's process; its random generators stay where they are if
    there is a seed.
    """
    units = items if call.batch is None else _batched(items, call.batch)
    for number, unit in enumerate(units):
        index = number * (call.batch or 1)
        keeping = contextlib.nullcontext() if call.stream is None else kept_states()
        try:
            with occupied(device), keeping:
                result = call(unit, index, not device.is_slot)
        except Exception as error:
            message = f"item {index} failed on {device}: {failure_records.reason(error)}"
            raise ItemFailed(message, index, own_traceback(error)) from error

        if not device.is_slot:
            result = each(torch.Tensor.cpu, result)
        if call.batch is None:
            yield result
        else:
            yield from result
        del result


class ProcessMap:
    """A map over processes.

    Args:
        call: the function.
        items: drawn from as chunks are made of them.
        devices: a process for each.
        total: how many items there are, where that is known.
        on_output: as `lockstep.launch.launch`'s, for all workers.

    Raises:
        InputError: the function can't be sent.
    """

    def __init__(
        self,
        call: Call,
        items: Iterator[Any],
        devices: tuple[Device, ...],
        total: int | None,
        on_output: Callable[[str, str], None] | None,
    ) -> None:
        given = {"batch_size": call.batch, "seed": call.seed}
        self._body = pickled({"serve": serve, "the function": call.fn, **given})
        self._on_output = on_output
        self._batch = call.batch
        self._units = items if call.batch is None else _batched(items, call.batch)
        self._total = None if total is None else math.ceil(total / (call.batch or 1))
        self._devices = devices
        self._waiting: deque[_Chunk] = deque()
        self._at: dict[int, _Chunk] = {}
        self._free = [[0, 1] for _ in devices]
        self._held = 0
        self._pace = _Pace()
        self._sent = 0
        self._drawn = 0
        self._ending: BaseException | None = None
        self._is_drawn = False

    def results(self) -> Iterator[Any]:
        """The result of each item, in order.

        Raises:
            InputError: an item (it is named) can't be sent.
            ItemFailed: the function raised for an item, or a worker died.
        """
        with contextlib.ExitStack() as stack:
            self._blocks = [[new_block(stack) for _ in free] for free in self._free]
            self._workers = workers = stack.enter_context(
                Supervisor(
                    Setup(self._devices, Modes.here(self._devices)),
                    self._body,
                    blocks_of=lambda worker: self._blocks[worker],
                    on_event=self._hear,
                    on_output=self._on_output,
                )
            )
            while True:
                if self._waiting and self._waiting[0].results is not None:
                    yield from self._given(self._waiting.popleft())
                elif self._may_send():
                    self._send()
                    self._turn(0)
                elif self._waiting:
                    self._turn(None)
                else:
                    break
            if self._ending is not None:
                raise self._ending
            for worker in range(len(self._devices)):
                workers.send(worker, b"")
            workers.watch()

    def _given(self, chunk: _Chunk) -> Iterator[Any]:
        """Its results one by one; the workers are kept at work meanwhile."""
        results = chunk.results
        assert results is not None
        looked = time.perf_counter()
        while results:
            result = results.popleft()
            if self._batch is None:
                yield result
            else:
                yield from result
            del result
            if time.perf_counter() - looked > _LOOK:
                looked = time.perf_counter()
                self._turn(0)
                if self._may_send():
                    self._send()
        self._held -= chunk.bytes
        if chunk.failure is not None:
            raise failed(chunk.failure, self._devices[chunk.worker])

    # ---- sending ---------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        if self._is_drawn or not any(self._free):
            return False
        if len(self._waiting) < 2 * len(self._devices):
            return True
        return len(self._waiting) < _AHEAD * len(self._devices) and self._held < _HELD

    def _send(self) -> None:
        """Draw a chunk, and give it to the worker that has least to do."""
        size = self._pace.size
        if self._total is not None:  # smaller ones at the end, so that all end together
            size = max(1, min(size, (self._total - self._drawn) // (2 * len(self._devices))))
        units = self._draw(size)
        if not units:
            return
        worker = max(range(len(self._free)), key=lambda w: len(self._free[w]))
        slot = self._free[worker].pop(0)
        block = self._blocks[worker][slot]
        size = 0
        with contextlib.suppress(Exception):
            size = pack(units, block)
        # Outside of a handler: how pickling went wrong inside tells a person nothing.
        if not size:
            units = self._sendable(units, block)
            size = pack(units, block)
        if not units:
            self._free[worker].append(slot)
            return
        first = self._sent * (self._batch or 1)
        self._sent += len(units)
        chunk = _Chunk(first, len(units), worker, slot, block, size)
        self._waiting.append(chunk)
        self._at[first] = chunk
        self._workers.send(worker, pickle.dumps(Task(first, slot)))

    def _draw(self, size: int) -> list[Any]:
        """The next items: ``size`` of them, or fewer where they are slow to come, or end."""
        units = []
        limit = time.perf_counter() + _SECONDS
        # A generator may write its next item into the same memory.
        copies = size > 1 and self._batch is None
        try:
            for unit in itertools.islice(self._units, size):
                units.append(own_copy(unit) if copies else unit)
                if time.perf_counter() > limit:
                    break
            else:
                self._is_drawn = len(units) < size
        except Exception as error:  # given when those before it have been
            self._is_drawn = True
            self._ending = error
        self._drawn += len(units)
        return units

    def _sendable(self, units: list[Any], block: int) -> list[Any]:
        """Return the items before the first that can't be sent. That one ends the map once these
        have been given.
        """
        self._is_drawn = True
        good, _ = first_that_cant_be_packed(units, block)
        items = [units[good]] if self._batch is None else units[good]
        place, error = first_that_cant_be_packed(items, block)
        index = (self._sent + good) * (self._batch or 1) + place
        self._ending = InputError(
            f"item {index} (a {type(items[place]).__qualname__}) can't be sent to a process: "
            f"{told(error)}: send what it is made of, and make it in the function"
        )
        return units[:good]

    # ---- hearing ---------------------------------------------------------------------------------

    def _turn(self, seconds: float | None) -> None:
        self._workers.turn(seconds)
        if self._workers.failed_at is None:
            return
        failures = self._workers.failures()
        if failures:
            raise self._death(min(failures, key=lambda failure: failure.time))

    def _hear(self, worker: int, reply: Reply) -> None:
        chunk = self._at.pop(reply.first)
        try:
            results = unpack(chunk.block)
        except Exception as error:
            items = named(chunk.first, chunk.units * (self._batch or 1))
            raise ItemFailed(
                f"{items}: the results can't be read here: {error}", chunk.first
            ) from error
        self._free[worker].append(chunk.slot)
        self._pace.learn(chunk.units, reply.seconds, max(chunk.bytes, reply.bytes))
        chunk.bytes = reply.bytes
        chunk.results = deque(results)
        chunk.failure = reply.failure
        self._held += chunk.bytes
        if reply.failure is not None:
            self._is_drawn = True  # what comes after it will not be given

    def _death(self, failure: Record | failure_records.Death) -> BaseException:
        device = self._devices[failure.rank]
        if isinstance(failure, Record):
            return failure_records.caused(
                RunError(f"a process of the map ({device}) could not begin: {failure.reason}"),
                failure,
            )
        if failure.step == 0:
            return ItemFailed(
                f"a process of the map ({device}) "
                f"{failure_records.ending(failure.code, 'between two items')}"
            )
        index = failure.step - 1
        how = failure_records.ending(failure.code, f"at item {index}")
        return ItemFailed(f"the process of the map on {device} {how}", index)


def _batched(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    # A generator may write its next item into the same memory.
    while batch := [own_copy(item) for item in itertools.islice(items, size)]:
        yield batch
