"""Functions and values on their way to another process.

`cloudpickle` sends functions and classes of the person's script by value, so nothing has to be
imported there. A call goes through ``torch.save``, so that tensors which share memory do so in the
other process too (a loss that holds ``weight.detach()``, say).
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import torch

from lockstep.errors import InputError, first_line


def dumps(value: Any) -> bytes:
    """Return a value as bytes, for ``pickle.loads``."""
    try:
        return pickle.dumps(value)  # ten times as fast, and enough for numbers and names
    except Exception:
        return bytes(cloudpickle.dumps(value))


def pickled(given: dict[str, Any]) -> bytes:
    """Return a function and its arguments as bytes, for ``loads``.

    Args:
        given: the function, then its arguments, by the names that messages have for them.

    Raises:
        InputError: one of them can't be pickled, or is a model in shared memory; it is named.
    """
    for name, value in given.items():
        _refuse_shared(name, [value, *closed_over(value)])
    try:
        return _saved(tuple(given.values()))
    except Exception as whole:
        for name, value in given.items():
            try:
                _saved(value)
            except Exception as error:
                raise _cannot_be_sent(f"{name} ({_type_of(value)})", error) from error
        raise _cannot_be_sent("the function with its arguments", whole) from whole


def loads(body: bytes) -> tuple[Any, ...]:
    """Return the function and the arguments that ``pickled`` has made bytes of."""
    values: tuple[Any, ...] = torch.load(io.BytesIO(body), weights_only=False)
    return values


def cells_of(function: Any) -> list[types.CellType]:
    """List the cells of the variables around a function, those that have a value."""
    cells = getattr(function, "__closure__", None) or ()
    unassigned = types.CellType()
    return [cell for cell in cells if cell != unassigned]


def closed_over(function: Any) -> list[Any]:
    """Return what a function holds of the variables around it."""
    return [cell.cell_contents for cell in cells_of(function)]


def _refuse_shared(name: str, values: list[Any]) -> None:
    for model in values:
        if not isinstance(model, torch.nn.Module):
            continue
        for parameter in model.parameters():
            if parameter.is_cpu and parameter.is_shared():  # type: ignore[no-untyped-call]
                raise InputError(
                    f"{name} holds a model in shared memory, and each rank would get a copy of "
                    'it: make it in the function, or train it with strategy="hogwild"'
                )


def _cannot_be_sent(what: str, error: Exception) -> InputError:
    return InputError(
        f"{what} can't be sent to another process: {first_line(error)}: make what it holds inside "
        "the function"
    )


def _type_of(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"a {type(value).__qualname__}"


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_module=_CLOUDPICKLE, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


def _reduced_cache(cached: Any) -> Any:
    """Reduce what ``functools.lru_cache`` has made: one of the script goes by value."""
    if cached.__module__ == "__main__":
        return _cached, (cached.__wrapped__, cached.cache_parameters())
    return cached.__qualname__


def _cached(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return functools.lru_cache(**settings)(function)


def _reduced_code(code: types.CodeType) -> Any:
    """Reduce code with the name of its file, for tracebacks; cloudpickle 3.1.3 sends another."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)


def _reduced_property(kept: functools.cached_property[Any]) -> Any:
    """Reduce a cached property without the lock that it has in Python 3.11."""
    return _cached_property, (kept.func, kept.attrname)


def _cached_property(function: Callable[[Any], Any], name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(object, name)
    return made


def _restored(function: Any, given: tuple[Callable[..., None], Any, list[list[Any]]]) -> None:
    restore, state, contents = given
    restore(function, state)
    for cell, content in zip(function.__closure__, contents, strict=True):
        for value in content:
            cell.cell_contents = value


class _Globals(dict[str, Any]):
    """Stands for the global variables of a module that the other process imports."""

    def __reduce__(self) -> Any:
        return _globals_of, (self["__name__"],)


def _globals_of(module: str) -> dict[str, Any]:
    try:
        return vars(importlib.import_module(module))
    except ImportError:  # a file that was loaded by its path
        return {"__name__": module}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    dispatch_table: ClassVar[Any] = ChainMap(
        {
            functools._lru_cache_wrapper: _reduced_cache,
            functools.cached_property: _reduced_property,
            types.CodeType: _reduced_code,
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, value: Any) -> Any:
        """Reduce a function with its variables; cloudpickle would give each function its own."""
        if isinstance(value, types.FunctionType):
            name = value.__module__
            if value.__globals__ is vars(sys.modules.get(name) or object):
                self.globals_ref.setdefault(id(value.__globals__), _Globals(__name__=name))
        if isinstance(value, types.CellType):
            return types.CellType, ()  # a function that closes over it fills it
        reduced = super().reducer_override(value)
        cells = getattr(value, "__closure__", None)
        if not cells or not isinstance(reduced, tuple):
            return reduced
        make, arguments, (state, slots), *_, restore = reduced
        empty = types.CellType()
        contents = [[cell.cell_contents] if cell != empty else [] for cell in cells]
        given = restore, (state, {**slots, "__closure__": None}), contents
        return make, (*arguments[:4], cells), given, None, None, _restored


_CLOUDPICKLE = SimpleNamespace(__name__="cloudpickle", Pickler=_Pickler)
"""What ``torch.save`` takes for the module that pickles."""
