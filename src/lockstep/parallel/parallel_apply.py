"""Parallel apply: several modules or functions at the same time, each on its device.

``torch.nn.parallel.parallel_apply`` needs an accelerator, makes new threads for each call, and
turns what was raised into another exception. On slots, a thread without a limit of its own would
also take every core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lockstep.errors import InputError
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device, Devices, parse, slots
from lockstep.tensors import pytree
from lockstep.threads import random_streams
from lockstep.threads.thread_pool import run

T = TypeVar("T")


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Devices = None,
) -> list[Any]:
    """Call ``modules[i](*inputs[i], **kwargs_tup[i])`` for every i, all at the same time.

    Each runs in a thread of its device that stays for later calls, with the caller's grad mode,
    autocast, default device and context variables. Random numbers on the CPU come from one
    generator for all threads, in whatever order they ask.

    Args:
        modules: modules, or any callables.
        inputs: for each a list or tuple of its positional arguments; anything else is its only
            argument.
        kwargs_tup: for each its keyword arguments.
        devices: where each computes; the arguments must be there already. None is the
            accelerator that its first tensor is on, or else a CPU device: the machine's cores are
            cut in as many as there are modules.

    Returns:
        What each returned, in order.

    Raises:
        InputError: lists of different lengths.
        Exception: the first that one of them raised, with a note that names it: ``replica 1 on
            cpu:1``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    count = len(modules)
    _same_length(count, len(inputs), "inputs")
    named: Sequence[Mapping[str, Any] | None] = [None] * count
    if kwargs_tup is not None:
        named = kwargs_tup
    _same_length(count, len(named), "kwargs_tup")
    if not count:
        return []
    places = _places(devices, inputs, named)
    _same_length(count, len(places), "devices")

    calls = []
    for module, given, kwargs in zip(modules, inputs, named, strict=True):
        args = given if isinstance(given, (list, tuple)) else (given,)
        calls.append(functools.partial(module, *args, **(kwargs or {})))
    if not places[0].is_slot and len(set(places)) == 1:
        return _one_after_another(calls, places[0])
    return run(places, calls)


def in_streams(calls: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """Let each of several calls draw from a stream of its own, seeded by the caller's; one draws
    from the caller's.
    """
    streams = random_streams.Streams()
    drawing: list[Callable[[], T]] = []
    for i, call in enumerate(calls):
        source = random_streams.source()
        if len(calls) > 1:
            source = functools.partial(streams.generator, i)
        drawing.append(functools.partial(_in_stream, source, call))
    return drawing


def _in_stream(source: random_streams.Source | None, call: Callable[[], T]) -> T:
    """Call a function that draws its random numbers from ``source``."""
    with random_streams.stream(source):
        return call()


def _one_after_another(calls: Sequence[Callable[[], Any]], device: Device) -> list[Any]:
    """All on one accelerator: it has one queue of work, and threads would wait for each other's
    interpreter lock.
    """
    found = []
    with occupied(device):
        for i, call in enumerate(calls):
            try:
                found.append(call())
            except Exception as error:
                error.add_note(f"raised by replica {i} on {device}")
                raise
    return found


def _same_length(count: int, other: int, name: str) -> None:
    if other != count:
        raise InputError(f"{count} modules, but {other} {name}: give one for each module")


def _places(devices: Any, inputs: Sequence[Any], named: Sequence[Any]) -> tuple[Device, ...]:
    if devices is not None:
        return parse(devices)

    found = []
    for given, kwargs, slot in zip(inputs, named, slots(len(inputs)), strict=True):
        found.append(_device_of((given, kwargs), slot))
    return tuple(found)


def _device_of(arguments: Any, slot: Device) -> Device:
    """Return the accelerator that the first tensor is on, or else the slot."""
    tensor = next(pytree.tensors(arguments), None)
    if tensor is None or tensor.device.type == "cpu":
        return slot
    return Device(tensor.device.type, tensor.device.index or 0)
