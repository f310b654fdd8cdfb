"""The three global generators of random numbers: torch's on the CPU, Python's, and numpy's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import RandomState
from torch import Tensor


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all three for a while; their streams go on as before afterwards."""
    with kept_states():
        torch.manual_seed(seed)  # the accelerators' too
        seed_all(seed)
        yield


def seed_all(key: int, accelerators: Sequence[torch.device] = ()) -> None:
    """Seed torch, ``random`` and numpy, 7 us in all; ``torch.manual_seed`` alone takes 78.

    Args:
        key: the seed.
        accelerators: the generators of these devices are seeded too.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)
    for device in accelerators:
        seed_on(device, key)


def seed_on(device: torch.device, key: int) -> None:
    """Seed PyTorch's generator of one device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(key)
        return

    generators = getattr(torch.get_device_module(device), "default_generators", ())
    if generators:
        generators[device.index].manual_seed(key)
    else:
        put_state_on(device, torch.Generator(device).manual_seed(key).get_state())


@contextmanager
def kept_states(accelerators: Sequence[torch.device] = ()) -> Iterator[None]:
    """Give the three generators, and those of accelerators, back the states they have now."""
    before = states(accelerators)
    try:
        yield
    finally:
        put_states(before, accelerators)


class States(NamedTuple):
    """The states of generators of random numbers.

    Attributes:
        torch: of PyTorch's on the CPU.
        others: of ``random`` and numpy.
        accelerators: of PyTorch's on the devices that were asked for.
    """

    torch: Tensor
    others: tuple[Any, Any]
    accelerators: tuple[Tensor, ...] = ()


def states(accelerators: Sequence[torch.device] = ()) -> States:
    """Return the states of the three generators, and of those of accelerators."""
    on_accelerators = tuple(map(state_on, accelerators))
    return States(torch.get_rng_state(), other_states(), on_accelerators)


def put_states(wanted: States, accelerators: Sequence[torch.device] = ()) -> None:
    """Give the generators the states that ``states`` gave, of the same accelerators."""
    torch.set_rng_state(wanted.torch)
    set_other_states(wanted.others)
    for device, state in zip(accelerators, wanted.accelerators, strict=True):
        put_state_on(device, state)


def state_on(device: torch.device) -> Tensor:
    """Return the state of PyTorch's generator of one device."""
    if device.type == "cpu":
        return torch.get_rng_state()

    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state(*_argument(device))
    return state


def put_state_on(device: torch.device, state: Tensor) -> None:
    """Give PyTorch's generator of one device a state that ``state_on`` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return

    module: Any = torch.get_device_module(device)
    module.set_rng_state(state, *_argument(device))


def _argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as functions of its module take it; MPS has one device, which no function
    takes.
    """
    return () if device.type == "mps" else (device,)


@contextmanager
def kept_state_on(device: torch.device) -> Iterator[None]:
    """Give PyTorch's generator of one device back the state it has now."""
    state = state_on(device)
    try:
        yield
    finally:
        put_state_on(device, state)


def other_states() -> tuple[Any, Any]:
    """Return the states of ``random`` and numpy, which PyTorch's checkpoints don't keep.

    They are equal where nothing was drawn in between.
    """
    kept: Any = numpy.random.get_state()
    name, numbers, *place = kept
    return random.getstate(), (name, numbers.tobytes(), *place)


def set_other_states(wanted: tuple[Any, Any]) -> None:
    """Give ``random`` and numpy the states that ``other_states`` gave."""
    random.setstate(wanted[0])
    name, numbers, *place = wanted[1]
    numpy.random.set_state((name, numpy.frombuffer(numbers, numpy.uint32), *place))


def same(a: States, b: States) -> bool:
    """Return whether nothing was drawn between the two."""
    if a.others != b.others or not torch.equal(a.torch, b.torch):
        return False
    return all(map(torch.equal, a.accelerators, b.accelerators))


# ---- generators that an object holds -------------------------------------------------------------


def _numpy_state(generator: numpy.random.Generator) -> Any:
    return copy.deepcopy(generator.bit_generator.state)


def _put_numpy_state(generator: numpy.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


GENERATORS: list[tuple[type[Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = [
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (RandomState, RandomState.get_state, RandomState.set_state),
    (numpy.random.Generator, _numpy_state, _put_numpy_state),
]
"""The kinds of generators, each with what gives its state, and what puts the state back."""

_KINDS = tuple(kind for kind, _, _ in GENERATORS)


@contextmanager
def kept_generators(holder: Any) -> Iterator[None]:
    """Give the generators that an object holds back the states they have now.

    They are attributes of the object, or of objects in its attributes, two levels deep.
    """
    before = []
    for generator in _generators_in(holder, levels=3):
        state, put = next((g, p) for kind, g, p in GENERATORS if isinstance(generator, kind))
        before.append((put, generator, state(generator)))
    try:
        yield
    finally:
        for put, generator, kept in before:
            put(generator, kept)


def _generators_in(holder: Any, levels: int) -> Iterator[Any]:
    held = getattr(holder, "__dict__", {}).values() if levels else ()
    for value in list(held):
        if isinstance(value, _KINDS):
            yield value
        elif not isinstance(value, Tensor | type):
            yield from _generators_in(value, levels - 1)
