"""The three global generators of random numbers: torch's on the CPU, Python's, and numpy's."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

_KINDS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
_OPAQUE = (torch.Tensor, numpy.ndarray, str, bytes, type, types.ModuleType)
_MOST = 10_000
"""Objects that are looked at for generators, at most."""
_OF_EACH = 100
"""And those of a list or dictionary."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all three for a while; their streams go on as before afterwards."""
    with kept_states():
        torch.manual_seed(seed)  # the accelerators' too
        seed_all(seed)
        yield


def seed_all(key: int) -> None:
    """Seed torch, ``random`` and numpy, 7 us in all; ``torch.manual_seed`` alone takes 78."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)


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


@contextmanager
def noted_seeding() -> Iterator[list[int]]:
    """The seeds that ``torch.manual_seed`` is given meanwhile, by whatever thread."""
    seeds: list[int] = []
    kept = torch.manual_seed

    def noting(seed: Any) -> torch.Generator:
        seeds.append(seed)
        return kept(seed)

    torch.manual_seed = torch.random.manual_seed = noting
    try:
        yield seeds
    finally:
        torch.manual_seed = torch.random.manual_seed = kept


class States(NamedTuple):
    """Where generators of random numbers stand.

    Attributes:
        torch: PyTorch's on the CPU.
        others: those of ``random`` and numpy.
        accelerators: PyTorch's on the devices that were asked for.
    """

    torch: torch.Tensor
    others: tuple[Any, Any]
    accelerators: tuple[torch.Tensor, ...] = ()


def states(accelerators: Sequence[torch.device] = ()) -> States:
    """Where the three stand, and those of accelerators."""
    return States(torch.get_rng_state(), other_states(), tuple(map(state_on, accelerators)))


def put_states(wanted: States, accelerators: Sequence[torch.device] = ()) -> None:
    """Give the generators the states that ``states`` gave, of the same accelerators."""
    torch.set_rng_state(wanted.torch)
    set_other_states(wanted.others)
    for device, state in zip(accelerators, wanted.accelerators, strict=True):
        put_state_on(device, state)


def state_on(device: torch.device) -> torch.Tensor:
    """Where PyTorch's generator of one device stands."""
    return _generator_on(device)[0]()


def put_state_on(device: torch.device, state: torch.Tensor) -> None:
    """Give PyTorch's generator of one device a state that ``state_on`` gave."""
    _generator_on(device)[1](state)


@contextmanager
def kept_state_on(device: torch.device) -> Iterator[None]:
    """Give PyTorch's generator of one device back the state it has now."""
    state = state_on(device)
    try:
        yield
    finally:
        put_state_on(device, state)


def _generator_on(
    device: torch.device,
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """How PyTorch's generator of a device is asked where it stands, and put there."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        return module.get_rng_state, module.set_rng_state
    return functools.partial(module.get_rng_state, device), lambda state: module.set_rng_state(
        state, device
    )


def other_states() -> tuple[Any, Any]:
    """Those of ``random`` and numpy alone, which PyTorch's checkpoints don't keep."""
    return random.getstate(), numpy.random.get_state()


def set_other_states(wanted: tuple[Any, Any]) -> None:
    """Give ``random`` and numpy the states that ``other_states`` gave."""
    random.setstate(wanted[0])
    numpy.random.set_state(wanted[1])


def same(a: States, b: States) -> bool:
    """Whether nothing was drawn between the two."""
    of_torch = zip((a.torch, *a.accelerators), (b.torch, *b.accelerators), strict=True)
    return all(torch.equal(one, other) for one, other in of_torch) and same_others(
        a.others, b.others
    )


def same_others(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether nothing was drawn from ``random`` and numpy between the two."""
    return bool(a[0] == b[0] and (a[1][1] == b[1][1]).all() and a[1][2:] == b[1][2:])


def generators_in(holder: Any) -> list[Any]:
    """The generators that an object holds, also in objects within it; of large ones the first
    items are looked at.
    """
    found, seen, ahead = [], set[int](), deque([holder])
    while ahead and len(seen) < _MOST:
        one = ahead.popleft()
        if id(one) in seen or isinstance(one, _OPAQUE):
            continue
        seen.add(id(one))
        if isinstance(one, _KINDS) and not isinstance(one, random.SystemRandom):
            found.append(one)
            continue
        items = (
            one.values()
            if isinstance(one, Mapping)
            else one
            if isinstance(one, list | tuple | set)
            else ()
        )
        ahead.extend(itertools.islice(items, _OF_EACH))
        ahead.extend(getattr(one, "__dict__", {}).values())
    return found


def state_of(generator: Any) -> bytes:
    """Where one that ``generators_in`` found stands."""
    own = generator.get_state().tolist() if isinstance(generator, torch.Generator) else generator
    return pickle.dumps(own)
