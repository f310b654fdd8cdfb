"""What a worker of a map does: the function of each item of a chunk, under random numbers that
belong to the item.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.data.shares import MAP, absorbed
from lockstep.errors import InputError
from lockstep.launch.devices import Device
from lockstep.launch.processes.failure_records import Failure
from lockstep.launch.processes.rank import EVENT, Channel
from lockstep.launch.world import World
from lockstep.map.shared_values import pack, unpack
from lockstep.tensors.seeding import seed_all


class Reply(NamedTuple):
    """What a worker reports of its oldest chunk; the results are in the block of the chunk.

    Attributes:
        length: how many results there are, up to the first failure.
        seconds: that computing them took.
        bytes: of the results.
        failure: the first, with ``step`` the index of the item; None where there was none.
    """

    length: int
    seconds: float
    bytes: int
    failure: Failure | None


class Call:
    """The function of a map, as it is called here or in a worker.

    Args:
        fn: the person's.
        batch: items that it takes as a list, and gives a list of results of; None: one, by itself.
        seed: of the random numbers, which follow the index of the (first) item.

    Attributes:
        size: how many items a call takes.
    """

    def __init__(self, fn: Callable[..., Any], batch: int | None, seed: int) -> None:
        self.fn = fn
        self.batch = batch
        self.seed = seed
        self.size = batch or 1
        # What is the same for all items is mixed once: it is a part of what small items cost.
        self._stream = absorbed(0, seed, MAP)

    def __call__(self, items: list[Any], index: int, on_accelerator: bool = False) -> list[Any]:
        """Return the results of one call: that of an item, or those of a batch.

        Raises:
            InputError: it gave not one result for each item of a batch.
        """
        key = absorbed(self._stream, index) >> 1  # mixed(seed, MAP, index)
        if on_accelerator:
            torch.manual_seed(key)
        seed_all(key)
        if self.batch is None:
            return [self.fn(items[0])]

        results = list(self.fn(items))
        if len(results) != len(items):
            raise InputError(
                f"with batch_size the function gave {len(results)} results for {len(items)} items"
            )
        return results


def serve(
    world: World,
    channel: Channel,
    blocks: tuple[int, ...],
    function: Callable[..., Any],
    batch: int | None,
    seed: int,
) -> None:
    """Work on chunks until there are no more."""
    call = Call(function, batch, seed)
    for block in itertools.cycle(blocks):
        head = channel.next()
        if not head:
            return
        first, count = pickle.loads(head)
        channel.send(EVENT, _reply(call, first, count, block, world.device))


def _reply(call: Call, first: int, count: int, block: int, device: Device) -> Reply:
    """Compute the results of a chunk, and put them in place of the items.

    Args:
        call: the function.
        first: the index of the first item.
        count: how many items there are.
        block: where they are.
        device: of this process.
    """
    index = first
    results: list[Any] = []
    failure = None
    began = time.perf_counter()
    try:
        items = unpack(block, count)
        for start in range(0, count, call.size):
            index = first + start
            group = items[start : start + call.size]
            results += call(group, index, not device.is_slot)
    except BaseException as error:
        failure = Failure.of(error, began, 0, index)
    torch.clear_autocast_cache()  # the modes stay entered for as long as the worker lives
    seconds = time.perf_counter() - began
    packed = pack(results, block)
    if packed.error is not None:
        what = f"its result (a {packed.kind}) can't be sent back: {packed.error}"
        failure = Failure.of(TypeError(what), began, 0, first + packed.length)
    return Reply(packed.length, seconds, packed.bytes, failure)


def named(first: int, size: int) -> str:
    """Return ``item 3``, or ``items 3 to 5``."""
    return f"item {first}" if size == 1 else f"items {first} to {first + size - 1}"
