"""A snapshot of all that a model, and objects beside it, hold, to be put back."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lockstep.tensors.seeding import States, put_states, same_others, states

_DEEP = 7
"""Levels of what modules hold that are put back: attributes, what is in them, and so on."""

_LONG = 1000
"""Items of a container beyond which it holds data, say, and no state."""

_LIBRARIES = (
    "torch",
    "lockstep",
    "threading",
    "queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "logging",
)
"""Packages whose objects are left alone: other threads may use them meanwhile."""

_OPAQUE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, str, bytes)


class Snapshot:
    """All that a model, and objects beside it, hold, and random numbers, to be put back.

    Weights, which of them are trained, buffers, attributes, and what lies in them: containers,
    arrays, generators, and objects of other classes.

    Args:
        model: the model.
        beside: other objects with state: the loss.
        accelerators: whose random numbers are put back, too.
        parameters: whether parameters are put back, too.
    """

    def __init__(
        self,
        model: nn.Module,
        beside: Sequence[Any] = (),
        accelerators: Sequence[torch.device] = (),
        *,
        parameters: bool = True,
    ) -> None:
        self._model = model
        self._beside = beside
        self._accelerators = accelerators
        held = _reachable([*model.modules(), *beside])
        if not parameters:
            held = (one for one in held if not isinstance(one, nn.Parameter))
        self._kept = [(one, *_copied_with_restore(one)) for one in held]
        self._before = {name: _copied(value) for name, value in self._named().items()}
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._random: States = states(accelerators)

    def put_back(self) -> None:
        """Put all of it back."""
        with torch.no_grad():
            for one, copied, restore in self._kept:
                restore(one, copied)
        for p, is_trained in self._trained:
            if p.requires_grad is not is_trained:
                p.requires_grad_(is_trained)
        put_states(self._random, self._accelerators)

    def drew_elsewhere(self) -> bool:
        """Whether Python or numpy has drawn, whose numbers can't be replayed."""
        return not same_others(self._random.others, states().others)

    def _named(self) -> dict[str, Any]:
        """Parameters, buffers and numbers by name, and tensors of the loss: what may act later."""
        found: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            way = f"{path}." if path else ""
            for owner in (module._parameters, module._buffers):
                found.update((way + key, its) for key, its in owner.items() if its is not None)
            for key, value in vars(module).items():
                if isinstance(value, int | float):
                    found[way + key] = value
        for one in self._beside:
            for key, value in getattr(one, "__dict__", {}).items():
                if isinstance(value, Tensor | int | float):
                    found[f"the loss.{key}"] = value
        return found

    def values(self) -> dict[str, Any]:
        """Copies of those values that have changed, by name."""
        now = self._named()
        changed = [name for name, value in now.items() if not same(value, self._before.get(name))]
        return {name: _copied(now[name]) for name in changed}

    def written(self, ends: Mapping[str, Any]) -> list[str]:
        """The parameters among the values that have changed."""
        return [name for name in ends if name in self._parameters]

    def ends_otherwise(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        """The other values that end otherwise.

        A tensor in an attribute of the model is left out: mostly it is that of the last batch.
        """
        names = [name for name in {**one, **other} if name not in self._parameters]
        return [name for name in names if not same(one.get(name), other.get(name))]


def same(one: Any, other: Any) -> bool:
    """Whether two tensors, or numbers, are equal; NaN is NaN."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() or one.layout is not torch.strided:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """Everything that can change and is held by these, some levels deep. Of long containers only
    they themselves.
    """
    seen: set[int] = set()
    level = roots
    for _ in range(_DEEP):
        below: list[Any] = []
        for one in level:
            if id(one) in seen or _is_opaque(one):
                continue
            seen.add(id(one))
            if isinstance(one, _CHANGEABLE):
                yield one
            below += _within(one)
        level = below


def _within(one: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(one, dict | list | tuple | set | collections.deque):
        items = one.values() if isinstance(one, dict) else one
        return list(items) if len(items) <= _LONG else []
    if isinstance(one, Tensor) or not hasattr(one, "__dict__"):
        return []
    return [vars(one)]


def _is_opaque(one: Any) -> bool:
    """Whether an object is left alone: no state of a model's own."""
    if isinstance(one, _OPAQUE) or type(one).__name__ == "DTensor":  # its values are other ranks'
        return True
    if isinstance(one, (nn.Module, *_CHANGEABLE)):
        return False
    return type(one).__module__.partition(".")[0] in _LIBRARIES


def _copied(one: Any) -> Any:
    """A copy of what an object holds itself."""
    for kinds, copied, _ in _KINDS:
        if isinstance(one, kinds):
            return copied(one)
    return one


def _copied_with_restore(one: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A copy of what an object holds itself, and what puts it back."""
    for kinds, copied, restore in _KINDS:
        if isinstance(one, kinds):
            return copied(one), restore
    raise TypeError(type(one))


def _restore_tensor(one: Tensor, copied: Tensor) -> None:
    if not same(one, copied):
        one.detach().copy_(copied)


def _restore_dict(one: dict[Any, Any], copied: dict[Any, Any]) -> None:
    if list(one) != list(copied) or [*map(id, one.values())] != [*map(id, copied.values())]:
        one.clear()
        one.update(copied)


def _restore_set(one: set[Any], copied: set[Any]) -> None:
    one.clear()
    one.update(copied)


def _restore_deque(one: collections.deque[Any], copied: collections.deque[Any]) -> None:
    one.clear()
    one.extend(copied)


def _restore_array(one: Any, copied: Any) -> None:
    if one.flags.writeable:
        one[...] = copied


_KINDS: list[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]] = [
    (Tensor, lambda one: one.detach().clone(), _restore_tensor),
    (dict, dict.copy, _restore_dict),
    (list, list.copy, lambda one, copied: one.__setitem__(slice(None), copied)),
    (set, set.copy, _restore_set),
    (collections.deque, collections.deque.copy, _restore_deque),
    (numpy.ndarray, numpy.copy, _restore_array),
    (
        (torch.Generator, numpy.random.RandomState),
        lambda one: one.get_state(),
        lambda one, copied: one.set_state(copied),
    ),
    (
        numpy.random.Generator,
        lambda one: copy.deepcopy(one.bit_generator.state),
        lambda one, copied: setattr(one.bit_generator, "state", copied),
    ),
    (
        random.Random,
        lambda one: one.getstate(),
        lambda one, copied: one.setstate(copied),
    ),
]
"""How each kind of object is copied and put back."""

_CHANGEABLE = tuple(
    kind for kinds, _, _ in _KINDS for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
)
