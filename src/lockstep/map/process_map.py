"""A function over processes: chunks of items out, results back, in order, with a bounded number of
them under way.

::

    items ──> | chunk 7 | chunk 6 |  two at most with each worker: one in work, one that waits
              | chunk 5 | chunk 4 | ... done, or not yet: kept until all before have been given
              | chunk 3 |  ──> results

The caller's thread does it all, when it asks for a result: nothing runs in its process meanwhile,
items are drawn from a generator where they are used, and Ctrl-C ends it as it ends any loop. Each
worker has two blocks, which it uses in turn: the items of a chunk lie in one, then the results. A
new chunk comes only when its block was read, so nobody waits for memory.

The size of a chunk follows what the last ones took, to some hundredths of a second and some
megabytes: the hand-over of a chunk costs a fraction of a millisecond.

``concurrent.futures.ProcessPoolExecutor`` doesn't do here: it imports the person's script again in
each process, leaves the workers running when the caller is killed, and doesn't tell which of them
died, of what, and at which items. Chunks of the same sizes over two of its processes took 1.0 to
0.9 of the time here for functions of 0.1 ms, and twice the time for tensors of 256 KB, which go
through pipes there.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import InputError, ItemFailed, RunError, error_line, own_traceback
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device
from lockstep.launch.processes.call import Setup
from lockstep.launch.processes.failure_records import Failure, reason
from lockstep.launch.processes.modes import modes_here
from lockstep.launch.processes.pickling import pickled
from lockstep.launch.processes.supervisor import Supervisor
from lockstep.map.map_worker import Call, Reply, named, serve
from lockstep.map.shared_values import new_block, pack, unpack
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


@dataclass(eq=False, slots=True)
class _Chunk:
    """Items on their way, or their results on theirs.

    Attributes:
        first: the index of the first item.
        count: how many items there are.
        worker: the number of the worker.
        block: where items, then results are.
        bytes: of the items, then of the results.
        results: up to the first failure; None until the worker has replied.
        failure: of one of the items.
    """

    first: int
    count: int
    worker: int
    block: int
    bytes: int
    results: Any = None
    failure: Failure | None = None


class _Pace:
    """How many items make a chunk.

    Attributes:
        size: of the next one; it grows eightfold at most.
    """

    def __init__(self) -> None:
        self.size = 1
        self._seconds = 0.0

    def learn(self, count: int, seconds: float, size: int) -> None:
        """Take note of a chunk: its items, the seconds of the worker, and the bytes one way."""
        each = seconds / count
        if self._seconds:
            each = (each + self._seconds) / 2
        self._seconds = each
        by_time = _SECONDS / max(each, 1e-7)
        by_size = _BYTES * count / max(size, 1)
        size = int(min(by_time, by_size, 8 * self.size))
        self.size = max(1, size)


def in_this_one(call: Call, items: Iterator[Any], device: Device) -> Iterator[Any]:
    """Compute the results in the caller's process, whose random generators stay where they are."""
    for index in itertools.count(0, call.size):
        drawn = itertools.islice(items, call.size)
        # A generator may write its next item into the same memory.
        group = list(drawn) if call.size == 1 else [own_copy(item) for item in drawn]
        if not group:
            return

        try:
            with occupied(device), kept_states():
                results = call(group, index, not device.is_slot)
        except Exception as error:
            message = f"item {index} failed on {device}: {reason(error)}"
            raise ItemFailed(message, index, own_traceback(error)) from error

        if not device.is_slot:
            results = each(torch.Tensor.cpu, results)
        yield from results
        del results


class ProcessMap:
    """A map over processes.

    Args:
        call: the function.
        items: drawn from as chunks are made of them.
        devices: a process for each.

    Raises:
        InputError: the function can't be sent.
    """

    def __init__(
        self,
        call: Call,
        items: Iterator[Any],
        devices: tuple[Device, ...],
    ) -> None:
        given = {"batch_size": call.batch, "seed": call.seed}
        self._body = pickled({"serve": serve, "the function": call.fn, **given})
        self._batch = call.size
        self._items = items
        self._devices = devices
        self._waiting: deque[_Chunk] = deque()  # in the order of the items
        self._at: list[deque[_Chunk]] = [
            deque() for _ in devices
        ]  # each worker's, the oldest first
        self._held = 0
        self._pace = _Pace()
        self._sent = 0
        self._ending: Exception | None = None
        self._is_drawn = False

    def results(self) -> Iterator[Any]:
        """Yield the result of each item, in order.

        Raises:
            InputError: an item (it is named) can't be sent.
            ItemFailed: the function raised for an item, or a worker died.
        """
        with contextlib.ExitStack() as stack:
            blocks = [[new_block(stack), new_block(stack)] for _ in self._devices]
            self._blocks = [itertools.cycle(pair) for pair in blocks]
            started = Supervisor(
                Setup(self._devices, modes_here(self._devices)),
                self._body,
                blocks_of=lambda worker: blocks[worker],
                on_event=self._hear,
            )
            self._workers = stack.enter_context(started)

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
                self._workers.send(worker, b"")
            self._workers.watch()

    def _given(self, chunk: _Chunk) -> Iterator[Any]:
        """Yield the results of a chunk, then draw another one."""
        yield from chunk.results
        self._held -= chunk.bytes
        if chunk.failure is not None:
            device = self._devices[chunk.worker]
            message = f"item {chunk.failure.step} failed on {device}{chunk.failure.why}"
            made = ItemFailed(message, chunk.failure.step, chunk.failure.traceback)
            raise chunk.failure.causes(made)
        self._turn(0)
        if self._may_send():
            self._send()

    # ---- sending ---------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        """Return whether a chunk may be drawn: there are items, a worker has a free block, and few
        wait.
        """
        if self._is_drawn or min(map(len, self._at)) == 2:
            return False
        each = _AHEAD if self._held < _HELD else 2
        return len(self._waiting) < each * len(self._devices)

    def _send(self) -> None:
        """Draw a chunk, and give it to the worker that has least to do."""
        under_way = [len(chunks) for chunks in self._at]
        worker = under_way.index(min(under_way))
        block = next(self._blocks[worker])
        packed = pack(self._drawn(), block)
        count = packed.length

        if packed.error is not None:
            self._is_drawn = True
            self._ending = InputError(
                f"item {self._sent + count} (a {packed.kind}) can't be sent to a process: "
                f"{error_line(packed.error)}: send what it is made of, and make it in the function"
            )
        if self._ending is not None:  # what is left of a batch is not given
            count -= count % self._batch
        if not count:
            return

        chunk = _Chunk(self._sent, count, worker, block, packed.bytes)
        self._waiting.append(chunk)
        self._at[worker].append(chunk)
        self._workers.send(worker, pickle.dumps((self._sent, count)))
        self._sent += count

    def _drawn(self) -> Iterator[Any]:
        """Yield the items of the next chunk: fewer where they are slow to come, or end."""
        limit = time.perf_counter() + _SECONDS
        size = max(1, self._pace.size // self._batch) * self._batch
        count = 0
        try:
            for item in itertools.islice(self._items, size):
                yield item
                count += 1
                if time.perf_counter() > limit and count % self._batch == 0:
                    return
            self._is_drawn = count < size
        except Exception as error:  # raised when the results before it have been given
            self._is_drawn = True
            self._ending = error

    # ---- hearing ---------------------------------------------------------------------------------

    def _turn(self, seconds: float | None) -> None:
        """Hear the workers, and raise where one of them is gone."""
        self._workers.turn(seconds)
        if self._workers.failed_at is None:
            return
        failures = self._workers.failures()
        if failures:
            raise self._death(min(failures, key=lambda failure: failure.time))

    def _hear(self, worker: int, reply: Reply) -> None:
        """Take the results of a worker's oldest chunk."""
        chunk = self._at[worker].popleft()
        chunk.results = unpack(chunk.block, reply.length)
        self._pace.learn(chunk.count, reply.seconds, max(chunk.bytes, reply.bytes))
        chunk.bytes = reply.bytes
        chunk.failure = reply.failure
        self._held += chunk.bytes
        if reply.failure is not None:
            self._is_drawn = True  # what comes after it will not be given

    def _death(self, failure: Failure) -> BaseException:
        """Return the exception for a worker that is gone."""
        device = self._devices[failure.rank]
        if failure.how == "failed":
            made = RunError(f"the process of the map on {device} could not begin{failure.why}")
            return failure.causes(made)
        where = "between two items"
        first = None
        if self._at[failure.rank]:
            chunk = self._at[failure.rank][0]
            where = f"at {named(chunk.first, chunk.count)}"
            first = chunk.first
        text = f"the process of the map on {device} {failure.how} {where}{failure.why}"
        return ItemFailed(text, first)
