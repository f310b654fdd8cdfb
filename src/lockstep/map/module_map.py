"""A module over devices: a replica and a thread for each, to which batches go in turn.

A batch is put together in the caller's thread while the devices compute those before it; at most
two are under way on each. The replicas are in evaluation mode and without gradients; the module
itself is left as it is.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.data.shares import MAP, mixed
from lockstep.errors import InputError, ItemFailed, error_line
from lockstep.launch.devices import Device
from lockstep.map.map_worker import named
from lockstep.model.modes import has_own_train
from lockstep.parallel.replicate import replicate
from lockstep.tensors.pytree import (
    call,
    described,
    each,
    named_parts,
    own_copy,
    parts,
    rebuilt,
    to_device,
)
from lockstep.tensors.rows import has_rows, holds_samples
from lockstep.tensors.seeding import seed_on
from lockstep.threads.random_streams import stream
from lockstep.threads.thread_pool import lent


def mapped(
    module: nn.Module,
    items: Iterator[Any],
    devices: tuple[Device, ...],
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
    seed: int,
) -> Iterator[Any]:
    """Return the outputs for each item, in order, on the CPU.

    Args:
        module: the original.
        items: inputs of one sample each; without ``batch_size`` whatever the module takes.
        devices: where it runs.
        batch_size: items of a batch.
        collate: makes a batch of a list of items; None is PyTorch's default.
        seed: of what the module draws, which follows the index of a batch's first item.

    Raises:
        InputError: the module can't be replicated; items can't be put together; outputs without a
            row for each item.
        ItemFailed: the module raised.
    """
    # A `train` of its own may write the weights, which replicas may share.
    if any(has_own_train(part) for part in module.modules()):
        module = copy.deepcopy(module).eval()
    replicas = replicate(module, list(devices), detach=True)
    for replica in replicas:
        for part in replica.modules():
            part.training = False

    under_way: deque[_Batch] = deque()
    with lent(devices) as workers:
        turns = itertools.cycle(range(len(devices)))
        first = 0
        while True:
            batch = []
            if len(under_way) < 2 * len(devices):
                batch = [own_copy(item) for item in itertools.islice(items, batch_size or 1)]
            if batch:
                inputs = batch[0] if batch_size is None else _together(batch, collate, first)
                number = next(turns)
                run = partial(_outputs, replicas[number], inputs, devices[number], seed, first)
                outputs = workers[number].start(run)
                under_way.append(_Batch(first, len(batch), devices[number], outputs))
                first += len(batch)

            if not under_way:
                return
            if not batch or under_way[0].outputs.done():
                yield from _results(under_way.popleft(), is_row=batch_size is not None)


class _Batch(NamedTuple):
    """A batch that a device computes.

    Attributes:
        first: the index of its first item.
        size: its items.
        device: where it is computed.
        outputs: of the module, on the CPU.
    """

    first: int
    size: int
    device: Device
    outputs: Future[Any]


def _results(batch: _Batch, *, is_row: bool) -> list[Any]:
    """Wait for the outputs of a batch: as they are, or a row for each item."""
    try:
        outputs = batch.outputs.result()
    except Exception as error:
        where = f"{named(batch.first, batch.size)} failed on {batch.device}"
        raise ItemFailed(f"{where}: {error_line(error)}", batch.first) from error
    return _rows(outputs, batch.size, "") if is_row else [outputs]


def _outputs(replica: nn.Module, inputs: Any, device: Device, seed: int, index: int) -> Any:
    """In the device's thread: the outputs, on the CPU."""
    key = mixed(seed, MAP, index)
    if not device.is_slot:
        seed_on(device.torch, key)
    with torch.no_grad(), stream(torch.Generator().manual_seed(key)):
        if device.is_slot:
            return call(replica, inputs)
        outputs = call(replica, to_device(inputs, device.torch))
        return each(torch.Tensor.cpu, outputs)


def _together(batch: list[Any], collate: Callable[[list[Any]], Any] | None, first: int) -> Any:
    """Make one input of the items of a batch."""
    try:
        return (collate or default_collate)(batch)
    except Exception as error:
        advice = "" if collate else "; give a collate that can"
        where = named(first, len(batch))
        text = f"{where} can't be batched: {error_line(error)}{advice}"
        raise InputError(text) from error


def _rows(outputs: Any, size: int, name: str) -> list[Any]:
    """Return the outputs of ``size`` items taken apart: the same nest with a row of each tensor,
    for each item.
    """
    if isinstance(outputs, torch.Tensor):
        if has_rows(outputs, size):
            return list(outputs.unbind())
        where = f"{name} is" if name else "they are"
        raise InputError(
            f"the module's outputs have no row for each of {size} items: {where} "
            f"{described(outputs)}: leave batch_size out, and pass batches as items"
        )

    if parts(outputs) is None:  # None, a word, a number: the same for each
        return [outputs] * size
    if type(outputs) is list and holds_samples(outputs, size):
        return outputs

    columns = []
    for key, part in named_parts(outputs):
        path = f"{name}.{key}".lstrip(".")
        columns.append(_rows(part, size, path))
    return [rebuilt(outputs, list(row)) for row in zip(*columns, strict=True)]
