"""``map``: a function over processes, or a module over devices, item by item, in order.

In reading order: this file (what a person calls), `process_map` and `map_worker` (the two ends of a
function's map), `shared_values` (what goes between them), `module_map` (a module's map).

``multiprocessing.Pool.imap`` refuses lambdas, draws a generator of any length into memory, waits
for ever where a process was killed, and pickles tensors; a pool of torch.multiprocessing holds a
file open for each tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError
from lockstep.settings import checked

if TYPE_CHECKING:
    from lockstep.launch.devices import Device, Devices

__all__ = ["map"]


def map(
    fn: Callable[..., Any],
    items: Iterable[Any],
    devices: Devices = "auto",
    batch_size: int | None = None,
    reduce: Callable[[Any, Any], Any] | tuple[Callable[[Any, Any], Any], Any] | None = None,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
) -> Any:
    """``fn(item)`` for each item, in order, as an iterator::

        for score in lockstep.map(lambda page: score_of(page), pages, devices=4): ...
        for logits in lockstep.map(model, images, devices="cuda", batch_size=64): ...
        total = lockstep.map(len, lines, reduce=lambda a, b: a + b)

    Nothing happens before the first result is asked for. Then items are drawn a little ahead (they
    may be a generator without an end), and results wait for those before them, a bounded number of
    each. Closing the iterator, leaving the loop or an exception ends the processes.

    *A function* runs in a process per device; with one device, in this one. It may be a lambda or
    local, and comes with what it refers to. Items are handed out several at a time where they are
    quick. Tensors and arrays in items and results, in any nesting, go through shared memory, as
    copies, without their graph, on the CPU. The function computes in the modes (``no_grad``,
    ``inference_mode``, ``autocast``) in which the first result is asked for.

    *A module* runs in a thread per device, as a replica in evaluation mode, without gradients. An
    item is called as the inputs of a Job are (a tuple as ``module(*item)``, a dict as
    ``module(**item)``); outputs come back on the CPU.

    What is drawn from the global generators of torch, ``random`` and numpy follows ``seed`` and the
    index of the item, so that results don't depend on the devices. (In a module: from torch's.)

    Args:
        fn: the function or the ``torch.nn.Module``.
        items: anything that can be gone through.
        devices: as in `lockstep.launch.devices`. ``"auto"`` is every accelerator; without one, a
            function gets a process for each core, a module one CPU device of all cores. Inside a
            training or another map there is only its own device.
        batch_size: a function is called with a list of this number of items (the last list may be
            shorter), and gives a list of as many results. A module gets the items put together as
            a batch, and its outputs are taken apart into rows. None: one item for each call, for a module
            whatever it takes.
        reduce: ``reduce(reduce(first, second), third)`` and so on is returned instead of an
            iterator: in the order of the items, here, so that it is the same each time. A pair is
            such a function and the value to start with.
        collate: puts a module's items together; None is PyTorch's default.
        seed: of all that is drawn.

    Raises:
        InputError: what was asked for can't be done, the function or an item can't be sent (the
            item's index and type are named), or the items to reduce are none.
        ItemFailed: the function raised for an item (``index``; ``__cause__`` is what it raised),
            after the results before it were given; or its process died, at once.
    """
    from torch import nn

    if not callable(fn):
        raise InputError(f"map: a function or a module is expected first, not {type(fn).__name__}")
    batch_size = checked("batch_size", batch_size, int | None)
    seed = checked("seed", seed, int)
    try:
        drawn = iter(items)
    except TypeError as error:
        raise InputError(f"items: {error}") from None
    places = _places(devices, isinstance(fn, nn.Module))

    if isinstance(fn, nn.Module):
        from lockstep.map import module_map

        if collate is not None and batch_size is None:
            raise InputError("collate: it needs a batch_size")
        results = module_map.mapped(fn, drawn, places, batch_size, collate, seed)
    else:
        if collate is not None:
            raise InputError(
                "collate: it is for a module; a function with a batch_size gets a list of items"
            )
        from lockstep.map import process_map
        from lockstep.map.map_worker import Call

        call = Call(fn, batch_size, seed)
        if len(places) == 1:
            results = process_map.in_this_one(call, drawn, places[0])
        else:
            results = process_map.ProcessMap(call, drawn, places).results()

    return results if reduce is None else _reduced(results, reduce)


def _places(wanted: Devices, is_module: bool) -> tuple[Device, ...]:
    """Return the devices of a map; only this process's own in a training or another map."""
    from lockstep.launch import devices as _devices
    from lockstep.launch import started_as_rank, started_ranks
    from lockstep.launch import world as _world

    world = _world.current()
    if world is not None:
        return (world.device,)
    if started_as_rank() and started_ranks.place().size > 1:
        return started_ranks.devices_of_this_rank(_devices.parse(wanted))
    return _devices.parse(wanted) if is_module else _devices.parse_several(wanted)


def _reduced(results: Iterator[Any], reduce: Any) -> Any:
    """Return the results folded from the first on.

    Raises:
        InputError: there is nothing to fold.
    """
    function, *start = reduce if isinstance(reduce, tuple) else (reduce,)
    if not callable(function) or len(start) > 1:
        raise InputError(
            "reduce: a function of two results, or a pair of one and the value to start with, is "
            "expected"
        )
    if not start:
        start = list(itertools.islice(results, 1))
    if not start:
        raise InputError(
            "reduce: there are no items; give a value to start with: reduce=(function, value)"
        )
    return functools.reduce(function, results, start[0])
