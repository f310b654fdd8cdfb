"""Snapshot: all that a model, and objects beside it, hold, to be put back."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lockstep.launch.processes.pickling import cells_of
from lockstep.tensors.seeding import (
    GENERATORS,
    States,
    other_states,
    put_states,
    state_on,
    states,
)

_DEEP = 7
"""How many levels of what modules hold are put back: attributes, what is in them, and so on."""

_LONG = 1000
"""The number of items beyond which a container is taken to hold data instead of state."""

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
"""Packages whose objects are left as they are: other threads may use them meanwhile."""

_OPAQUE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, str, bytes)


Restore = Callable[[Any, Any], Any]
"""Puts a copy back into an object."""

_Kept = tuple[Any, Any, Restore]
"""An object, a copy of what it holds itself, and what puts the copy back."""


class Snapshot:
    """What a model, and objects beside it, hold, and the states of random number generators.

    Weights, which of them are trained, buffers, attributes, and what lies in them: containers,
    arrays, generators, and objects of other classes.

    Args:
        model: the model.
        beside: other objects with state: the loss; a function has the variables around it.
        accelerators: devices whose generators are put back, too.
        parameters: whether parameters are put back, too.

    Attributes:
        parameters: the names of the parameters.
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
        self._kept = _kept_in([*model.modules(), *beside], parameters=parameters)
        self._before = dict(self._named())
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._random: States = states(accelerators)
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def put_back(self) -> None:
        """Put all of it back."""
        _put_back(self._kept)
        for p, is_trained in self._trained:
            if p.requires_grad is not is_trained:
                p.requires_grad_(is_trained)
        put_states(self._random, self._accelerators)

    def drew(self) -> bool:
        """Return whether random numbers were drawn from a generator of PyTorch's."""
        before = [self._random.torch, *self._random.accelerators]
        now = [torch.get_rng_state(), *map(state_on, self._accelerators)]
        if not all(map(torch.equal, before, now)):
            return True
        for one, state, _ in self._kept.values():
            if isinstance(one, torch.Generator) and not torch.equal(state, one.get_state()):
                return True
        return False

    def drew_elsewhere(self) -> bool:
        """Return whether random numbers of Python or numpy, which can't be replayed, were drawn."""
        return self._random.others != other_states()

    def changed(self) -> dict[str, Any]:
        """Copy the values that have changed, by name.

        They are parameters, buffers, numbers in attributes of modules, and tensors and numbers of
        the loss. Tensors in attributes of modules are left out: mostly they are of the last batch.
        """
        found = {}
        for name, value in self._named():
            before = self._before.get(name)
            if id(before) in self._kept:
                _, before, _ = self._kept[id(before)]
            if not same(value, before):
                found[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return found

    def _named(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        yield prefix + key, tensor
            for key, value in vars(module).items():
                if isinstance(value, int | float):
                    yield prefix + key, value
        for one in self._beside:
            for key, value in getattr(one, "__dict__", {}).items():
                if isinstance(value, Tensor | int | float):
                    yield f"the loss.{key}", value


@contextlib.contextmanager
def kept(one: Any) -> Iterator[None]:
    """Put back afterwards what an object, or the variables around a function, hold, parameters left
    out.
    """
    found = _kept_in([one], parameters=False)
    try:
        yield
    finally:
        _put_back(found)


def _kept_in(roots: list[Any], *, parameters: bool) -> dict[int, _Kept]:
    """Copy what objects hold, some levels deep."""
    variables = [cell for one in roots for cell in cells_of(one)]
    found = {}
    for one in reachable([*roots, *variables]):
        if parameters or not isinstance(one, nn.Parameter):
            for kind, copy, restore in _KINDS:
                if isinstance(one, kind):
                    found[id(one)] = (one, copy(one), restore)
                    break
    return found


def _put_back(found: dict[int, _Kept]) -> None:
    with torch.no_grad():
        for one, copied, restore in found.values():
            restore(one, copied)


def same(one: Any, other: Any) -> bool:
    """Return whether two tensors, or numbers, are equal; NaN is NaN."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if type(one) is not type(other):
            return False
        are_nan = one != one and other != other
        return bool(are_nan or one == other)
    if one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:  # PyTorch compares no sparse tensors
        one = one.to_dense()
        other = other.to_dense()
    if torch.equal(one, other):
        return True
    if not one.dtype.to_real().is_floating_point:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def reachable(roots: list[Any]) -> Iterator[Any]:
    """Yield each object that is held by ``roots``, some levels deep.

    What long containers hold is left out.
    """
    seen: set[int] = set()
    level = roots
    for _ in range(_DEEP):
        below: list[Any] = []
        for one in level:
            if id(one) in seen or _is_opaque(one):
                continue
            seen.add(id(one))
            yield one
            below += _within(one)
        level = below


def _within(one: Any) -> list[Any]:
    """List what an object holds."""
    if isinstance(one, types.CellType):
        return [one.cell_contents]
    if isinstance(one, dict):
        one = tuple(one.values())
    if isinstance(one, list | tuple | set | collections.deque):
        return list(one) if len(one) <= _LONG else []
    if isinstance(one, Tensor) or not hasattr(one, "__dict__"):
        return []
    return [vars(one)]


def _is_opaque(one: Any) -> bool:
    """Return whether an object is left as it is, since it is no state of a person's model."""
    if isinstance(one, _OPAQUE):
        return True
    if type(one).__name__ == "DTensor":
        # Other ranks have some of the values.
        return True
    if isinstance(one, (nn.Module, *_CHANGEABLE)):
        return False
    return type(one).__module__.partition(".")[0] in _LIBRARIES


def _restore_tensor(one: Tensor, copied: Tensor) -> None:
    if same(one, copied):
        return
    if one.shape == copied.shape:
        one.detach().copy_(copied)
    else:  # forward has resized it
        one.data = copied.clone()


def _refill(one: Any, copied: Any) -> None:
    if list(map(id, one)) == list(map(id, copied)):
        if not isinstance(one, dict):
            return  # other threads may read it
        if list(map(id, one.values())) == list(map(id, copied.values())):
            return
    one.clear()
    if isinstance(one, dict | set):
        one.update(copied)
    else:
        one.extend(copied)


def _restore_array(one: Any, copied: Any) -> None:
    if one.flags.writeable:
        one[...] = copied


def _content(cell: types.CellType) -> Any:
    return cell.cell_contents


def _restore_content(cell: types.CellType, content: Any) -> None:
    cell.cell_contents = content


_KINDS: list[tuple[Any, Callable[[Any], Any], Restore]] = [
    (Tensor, lambda one: one.detach().clone(), _restore_tensor),
    (dict, dict.copy, _refill),
    (list, list.copy, _refill),
    (set, set.copy, _refill),
    (collections.deque, collections.deque.copy, _refill),
    (numpy.ndarray, numpy.copy, _restore_array),
    (types.CellType, _content, _restore_content),
    *GENERATORS,
]
"""How each kind of object is copied and put back."""

_CHANGEABLE = tuple(kind for kind, _, _ in _KINDS)
