"""What a worker of a map does: the function of each item of a chunk, under random numbers that
belong to the item.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.data.shares import MAP, absorbed
from lockstep.errors import InputError, ItemFailed
from lockstep.launch.processes.failure_records import Record, caused
from lockstep.launch.processes.rank import WorkerContext
from lockstep.map.shared_values import first_that_cant_be_packed, pack, unpack
from lockstep.tensors.seeding import seed_all


class Task(NamedTuple):
    """The head of a chunk on its way to a worker.

    Attributes:
        first: the index of its first item, by which it is known.
        slot: of the worker's blocks, the one that holds a list of the items (or of lists of them,
            where ``batch`` isn't None), and is to hold a list of the results up to the first
            failure.
    """

    first: int
    slot: int


class Reply(NamedTuple):
    """What a worker tells of a chunk.

    Attributes:
        first: of the chunk.
        seconds: that computing it took.
        bytes: of the results.
        failure: the first, with ``step`` the index of its item; None where there was none.
    """

    first: int
    seconds: float
    bytes: int
    failure: Record | None


class Call:
    """The function of a map, as it is called for an item, here or in a worker.

    Args:
        fn: the person's.
        batch: items that it takes as a list, and gives a list of results of; None: one, by itself.
        seed: of the random numbers, which follow the index of the (first) item; None leaves the
            generators alone.
    """

    def __init__(self, fn: Callable[..., Any], batch: int | None, seed: int | None) -> None:
        self.fn, self.batch, self.seed = fn, batch, seed
        # What is the same for all items is mixed once: it is a part of what small items cost.
        self.stream = None if seed is None else absorbed(0, seed, MAP)

    def __call__(self, unit: Any, index: int, on_accelerator: bool = False) -> Any:
        """The result of an item, or the list of those of a batch.

        Raises:
            InputError: it gave not one result for each item of a batch.
        """
        if self.stream is not None:
            key = absorbed(self.stream, index) >> 1  # mixed(seed, MAP, index)
            if on_accelerator:
                torch.manual_seed(key)
            seed_all(key)
        result = self.fn(unit)
        if self.batch is not None:
            try:
                result = list(result)
            except TypeError:
                what = type(result).__name__
                raise InputError(
                    f"with batch_size the function should give a list, and gave: {what}"
                ) from None
            if len(result) != len(unit):
                raise InputError(
                    f"with batch_size the function gave {len(result)} results for {len(unit)} items"
                )
        return result


def serve(
    worker: WorkerContext, function: Callable[..., Any], batch: int | None, seed: int | None
) -> None:
    """Work on chunks until there are no more."""
    fn = Call(function, batch, seed)
    if fn.stream is None:  # else forks of one process would all draw the same
        key = int.from_bytes(os.urandom(8), "little") >> 1
        torch.manual_seed(key)
        seed_all(key)
    while head := worker.channel.next():
        worker.channel.tell(_reply(worker, fn, pickle.loads(head)))


def _reply(worker: WorkerContext, fn: Call, task: Task) -> Reply:
    worker.item = task.first
    block = worker.blocks[task.slot]
    results: list[Any] = []
    failure = None
    began = time.perf_counter()
    try:
        units = unpack(block)
        units.reverse()
        with worker.modes.entered():
            while units:
                results.append(fn(units.pop(), worker.item, not worker.device.is_slot))
                worker.item += fn.batch or 1
    except BaseException as error:
        failure = _record(error, worker)
    seconds = time.perf_counter() - began
    try:
        size = pack(results, block)
    except Exception:
        size, failure = _sendable(results, task, worker, fn)
    worker.item = -1
    return Reply(task.first, seconds, size, failure)


def _record(error: BaseException, worker: WorkerContext) -> Record:
    return Record.of(error, time.monotonic(), worker.number, worker.item)


def _sendable(
    results: list[Any], task: Task, worker: WorkerContext, fn: Call
) -> tuple[int, Record]:
    """The results before the first that can't be sent, and what is wrong with that."""
    block = worker.blocks[task.slot]
    place, error = first_that_cant_be_packed(results, block)
    worker.item = task.first + place * (fn.batch or 1)
    what = f"its result (a {type(results[place]).__qualname__}) can't be sent back: {error}"
    return pack(results[:place], block), _record(TypeError(what), worker)


def named(first: int, size: int) -> str:
    """``item 3``, or ``items 3 to 5``."""
    return f"item {first}" if size == 1 else f"items {first} to {first + size - 1}"


def failed(record: Record, device: object) -> BaseException:
    """The exception by which a map reports that an item failed, in this process or another."""
    message = f"item {record.step} failed on {device}: {record.reason}"
    return caused(ItemFailed(message, record.step, record.traceback), record)
