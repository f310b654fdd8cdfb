"""A module over devices: a replica and a thread for each, batches in turn to the one that has least
to do.

Of several such it is the one whose last batch was longest ago. A batch is put together in the
caller's thread while the devices compute those before it; at most two are under way on each. The
replicas are in evaluation mode and without gradients; the module itself is left as it is.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.data.shares import MAP, mixed
from lockstep.errors import InputError, ItemFailed, told
from lockstep.launch.devices import Device
from lockstep.map.map_worker import named
from lockstep.map.shared_values import copied
from lockstep.model.modes import has_own_train
from lockstep.parallel.replicate import replicate
from lockstep.tensors.pytree import (
    call,
    described,
    each,
    named_parts,
    parts,
    rebuilt,
    tensors,
    to_device,
)
from lockstep.tensors.seeding import seed_on
from lockstep.threads.random_streams import stream
from lockstep.threads.thread_pool import borrowed


def mapped(
    module: nn.Module,
    items: Iterator[Any],
    devices: tuple[Device, ...],
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
    seed: int | None,
) -> Iterator[Any]:
    """The outputs for each item, in order, on the CPU.

    Args:
        module: the original.
        items: inputs of one sample each; without ``batch_size`` whatever the module takes.
        devices: where it runs.
        batch_size: items of a batch.
        collate: makes a batch of a list of items; None is PyTorch's default.
        seed: of what the module draws, which follows the index of a batch's first item; None leaves
            generators alone.

    Raises:
        InputError: the module can't be replicated; items can't be put together; outputs without a
            row for each item.
        ItemFailed: the module raised.
    """
    if any(
        map(has_own_train, module.modules())
    ):  # it may write the weights, which replicas may share
        module = copy.deepcopy(module).eval()
    replicas = replicate(module, list(devices), detach=True)
    for part in itertools.chain(*(replica.modules() for replica in replicas)):
        part.training = False
    with borrowed(devices) as team:
        under_way: deque[tuple[int, int, int, Future[Any]]] = (
            deque()
        )  # index of the first, items, device
        busy, turns = (
            [0] * len(devices),
            [0] * len(devices),
        )  # batches under way, where the last one ended
        index = 0
        while True:
            while min(busy) < 2 and (
                batch := [copied(item) for item in itertools.islice(items, batch_size or 1)]
            ):
                inputs = batch[0] if batch_size is None else _together(batch, collate, index)
                number = min(range(len(devices)), key=lambda n: (busy[n], turns[n]))
                run = partial(_outputs, replicas[number], inputs, devices[number], seed, index)
                under_way.append((index, len(batch), number, team.start(number, run)))
                busy[number] += 1
                index += len(batch)
                turns[number] = index
                if under_way[0][3].done():
                    break
            if not under_way:
                return
            first, size, number, pending = under_way.popleft()
            try:
                outputs = pending.result()
            except Exception as error:
                where = f"{named(first, size)} failed on {devices[number]}"
                raise ItemFailed(f"{where}: {told(error)}", first) from error
            busy[number] -= 1
            if batch_size is None:
                yield outputs
            else:
                yield from _rows(outputs, size, "")


def _outputs(replica: nn.Module, inputs: Any, device: Device, seed: int | None, index: int) -> Any:
    """In the device's thread: the outputs, on the CPU."""
    generator = None
    if seed is not None:
        key = mixed(seed, MAP, index)
        generator = torch.Generator().manual_seed(key)
        if not device.is_slot:
            seed_on(device.torch, key)
    with torch.no_grad(), stream(generator):
        outputs = call(replica, inputs if device.is_slot else to_device(inputs, device.torch))
        return outputs if device.is_slot else each(lambda tensor: tensor.cpu(), outputs)


def _together(batch: list[Any], collate: Callable[[list[Any]], Any] | None, first: int) -> Any:
    try:
        return (collate or default_collate)(batch)
    except Exception as error:
        advice = "" if collate else "; give a collate that can"
        raise InputError(
            f"{named(first, len(batch))} can't be put together: {told(error)}{advice}"
        ) from error


def _rows(outputs: Any, size: int, name: str) -> list[Any]:
    """The outputs of ``size`` items taken apart: the same nest with a row of each tensor, for
    each item.
    """
    if isinstance(outputs, torch.Tensor):
        if not outputs.dim() or outputs.shape[0] != size:
            raise InputError(
                f"the module's outputs have no row for each of {size} items: {name or 'they'} "
                f"{'is' if name else 'are'} {described(outputs)}: leave batch_size out, and give "
                "it batches"
            )
        return list(outputs.unbind())
    inside = parts(outputs)
    if inside is None:  # None, a word, a number: the same for each
        return [outputs] * size
    are_batches = any(t.dim() and t.shape[0] == size for part in inside for t in tensors(part))
    if isinstance(outputs, list) and len(outputs) == size and not are_batches:  # one for each
        return outputs
    columns = [
        _rows(part, size, f"{name}.{below}".lstrip(".")) for below, part in named_parts(outputs)
    ]
    return [rebuilt(outputs, [column[i] for column in columns]) for i in range(size)]
