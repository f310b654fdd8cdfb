"""Attributes: what a module holds besides its parameters, buffers and modules, as its replica has to have it.

With ``self.forward = self.forward_impl``, ``self.blocks = [self.a, self.b]`` or ``self.f = lambda x: self.norm(x)`` a
replica would compute with the original's layers, in all threads at once, and write into their buffers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

_BARE = frozenset(vars(nn.Module()))
_DEPTH = 4
"""How deep in containers is looked; they may hold themselves."""


def own(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's attributes without those that every module has (its parameters, modules and hooks, among others)."""
    return [(key, value) for key, value in vars(module).items() if key not in _BARE]


def of_replica(value: Any, known: Mapping[int, Any], depth: int = _DEPTH) -> Any:
    """An attribute's value with the replica's parts in the place of the original's.

    Args:
        value: a module or tensor, a method, a function, a partial, or a list, tuple or dict of such things.
        known: the replica's modules and tensors, by the id of the original's.
        depth: of containers to look into.

    Returns:
        The same object where nothing of the original is in it.
    """
    if isinstance(value, (nn.Module, torch.Tensor)):
        return known.get(id(value), value)
    kind = type(value)
    if kind is types.FunctionType:
        return _function(value, known)
    if kind is types.MethodType:
        inside: list[Any] = [value.__self__]
    elif kind is functools.partial:
        inside = [value.func, value.args, value.keywords]
    elif depth and (kind is list or kind is tuple or kind is dict):
        inside = list(value.values() if kind is dict else value)
    else:
        return value
    changed = [of_replica(part, known, depth - 1) for part in inside]
    if all(one is other for one, other in zip(inside, changed, strict=True)):
        return value
    if kind is types.MethodType:
        return types.MethodType(value.__func__, changed[0])
    if kind is functools.partial:
        return functools.partial(changed[0], *changed[1], **changed[2])
    return dict(zip(value, changed, strict=True)) if kind is dict else kind(changed)


def entangled(module: nn.Module, parts: Iterable[int]) -> bool:
    """Whether its attributes hold any of the parts of the whole, which are given by their ids."""
    known: dict[int, Any] = dict.fromkeys(parts, _somebody)
    return any(of_replica(value, known) is not value for _, value in own(module))


def _somebody() -> None:
    """Stands for a part of a replica."""


def _function(function: types.FunctionType, known: Mapping[int, Any]) -> types.FunctionType:
    """The same function, closed over the replica's parts."""
    cells = function.__closure__ or ()
    if not any(id(_content(cell)) in known for cell in cells):
        return function
    closure = tuple(
        types.CellType(known[id(_content(cell))]) if id(_content(cell)) in known else cell for cell in cells
    )
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None
