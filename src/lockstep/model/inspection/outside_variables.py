"""Outside variables: those that functions of a person's own use and don't own, global and closed
over.

::

    seen = {}                                   a global, or a local variable of the function around

    def hook(module, inputs, output):
        seen["hidden"] = output                         a forward hook that writes it

    def loss(outputs, targets):
        return cross_entropy(outputs, targets) + 0.01 * seen["hidden"].abs().mean()

A copy of the model has the same ones, replicas in one process share them, and no checkpoint holds
them.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import is_own_code
from lockstep.launch.processes.call import closed_over
from lockstep.model.inspection.code_names import hash_of
from lockstep.model.inspection.own_calls import at_own_calls, slots_of
from lockstep.tensors.pytree import tensors

_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")  # (the last one in the body of a class)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The dictionaries of hooks that each module has."""


@dataclass
class _Variable:
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass
class Changes:
    """What a forward, or a step function, does to outside variables.

    Attributes:
        left: the names of those that it changes.
        put_back: the name of one that it changes and puts back.
    """

    left: tuple[str, ...] = ()
    put_back: str | None = None


class OutsideVariables:
    """Those of some functions, and of the functions and classes that these name.

    Args:
        roots: functions, methods, classes, or objects, whose classes are meant.

    Attributes:
        modules: those among them, which aren't looked at here.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        self._variables: dict[str, _Variable] = {}
        self._found: set[tuple[int, str | None]] = set()
        self._held: dict[int, Any] = {}
        self._classes: list[type] = []
        self._pending = list(roots)
        seen: set[int] = set()
        while self._pending:
            root = self._pending.pop()
            if id(root) in seen:
                continue
            seen.add(id(root))
            if isinstance(root, functools.partial):
                self._pending.append(root.func)
                for number, value in enumerate(root.args):
                    self._add(f"argument {number} of a partial", {"value": value}, "value")
                for name in root.keywords:
                    self._add(name, root.keywords, name)
            elif isinstance(root, types.MethodType):
                self._pending.append(root.__func__)
                self._add(type(root.__self__).__name__, root.__self__)
            elif isinstance(root, types.FunctionType):
                self._find_in_function(root)
            elif isinstance(root, type):
                self._find_in_class(root)
            else:
                self._add(type(root).__name__, root)

    @classmethod
    def of_model(cls, model: nn.Module) -> OutsideVariables:
        """Those of its modules' classes, of their hooks and of functions among their attributes."""
        roots: list[Any] = []
        for module in model.modules():
            roots.append(type(module))
            roots += (hook for kind in HOOKS for hook in getattr(module, kind).values())
        return cls([*roots, *functions_in(model)])

    def prints(self) -> dict[str, bytes]:
        """A hash of what each holds; of none that can't be pickled."""
        its = {name: hash_of(variable.get()) for name, variable in self._variables.items()}
        return {name: one for name, one in its.items() if one is not None}

    def changed_since(self, before: Mapping[str, bytes]) -> tuple[str, ...]:
        """The names of those that have other ``prints`` now."""
        return tuple(name for name, its in self.prints().items() if before.get(name) != its)

    @contextmanager
    def watched(self) -> Iterator[Changes]:
        """What is changed in it; what is put back where a function or a module is called
        meanwhile.
        """
        before, within, changes = self.prints(), set[str](), Changes()

        def look() -> None:
            now = self.prints()
            within.update(name for name in {**before, **now} if before.get(name) != now.get(name))

        with at_own_calls(look, self.values) if before else nullcontext():
            yield changes
        changes.left = self.changed_since(before)
        changes.put_back = min(within.difference(changes.left), default=None)

    def holds_tensors(self, name: str) -> bool:
        """Whether the variable of that name does."""
        held = [value for value, _ in copies_of(self._variables[name].get(), set())]
        return any(isinstance(value, torch.Tensor) for value in held)

    def values(self) -> list[Any]:
        """What each holds."""
        return [variable.get() for variable in self._variables.values()]

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor that they hold, or a module among them does, by the name of the variable."""
        for name, variable in self._variables.items():
            yield from ((name, tensor) for tensor in tensors(variable.get()))
        for module in self.modules:
            yield from itertools.chain(module.named_parameters(), module.named_buffers())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back afterwards what they hold now, in the same objects."""
        restore = self.keep()
        try:
            yield
        finally:
            restore()

    def keep(self) -> Callable[[], None]:
        """What does so, as often as it is called."""
        seen: set[int] = set()
        before = [(variable, variable.get()) for variable in self._variables.values()]
        copies = [pair for _, value in before for pair in copies_of(value, seen)]
        names = [(kind, set(vars(kind))) for kind in self._classes]

        def restore() -> None:
            for value, copied in copies:
                put_back(value, copied)
            for variable, value in before:
                if variable.get() is not value:
                    variable.set(value)
            for kind, its in names:
                for name in [name for name in set(vars(kind)) - its if not name.startswith("__")]:
                    delattr(kind, name)

        return restore

    # ---- finding them ----------------------------------------------------------------------------

    def _find_in_function(self, function: types.FunctionType) -> None:
        if not is_own_code(function.__code__.co_filename):
            if hasattr(function, "__wrapped__"):  # by a decorator of PyTorch's, say
                self._pending.append(function.__wrapped__)
            return
        called = function.__qualname__.rpartition("<locals>.")[
            2
        ]  # two classes may have an __init__ each
        self._add(f"attributes of {called}", vars(function))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for number, value in enumerate(defaults):
            self._add(f"{called}() default {number}", {"value": value}, "value")
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._add(name, cell, "cell_contents")
        names = list(_names_in(function.__code__))
        for name in _globals_in(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType):
                    if is_own_code(getattr(value, "__file__", None) or "<frozen"):
                        for inner in sorted(
                            set(names) & set(vars(value))
                        ):  # in the same order on each rank
                            self._add(f"{name}.{inner}", value, inner)
                else:
                    self._add(name, function.__globals__, name)

    def _find_in_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _is_own(base):
                self._classes.append(base)
                self._pending += _functions_of(base)
                for name in [n for n in vars(base) if not n.startswith("__")]:
                    self._add(f"{base.__name__}.{name}", base, name)

    def _add(self, name: str, holder: Any, key: str | None = None) -> None:
        """The variable ``key`` of a dict, a cell, a class or a module; or the holder itself, an
        object.
        """
        if key is None:
            variable = _Variable(lambda: holder, lambda value: None)
        elif isinstance(holder, dict):
            variable = _Variable(
                lambda: holder.get(key), lambda value: holder.__setitem__(key, value)
            )
        else:
            variable = _Variable(
                lambda: getattr(holder, key, None), lambda value: setattr(holder, key, value)
            )
        value = variable.get()
        if isinstance(value, _CODE):
            self._pending.append(value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        elif not isinstance(value, types.ModuleType | property):
            self._pending.append(type(value))
            self._held |= (held := held_by([value], self._held))
            self._pending += _functions_among(held)
            if (id(holder), key) not in self._found:  # (which the variable keeps alive)
                self._found.add((id(holder), key))
                self._variables[self._name_for(name)] = variable

    def _name_for(self, name: str) -> str:
        """The name, or where there is another variable of that name, ``"name (2)"``."""
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        return (
            name
            if name not in self._variables
            else next(n for n in numbered if n not in self._variables)
        )


def _functions_of(kind: type) -> list[types.FunctionType]:
    members = (getattr(m, "__func__", getattr(m, "fget", m)) for m in vars(kind).values())
    return [m for m in members if isinstance(m, types.FunctionType)]


def _is_own(kind: type) -> bool:
    """Whether it is a class of the person's own; one without methods is where its module is."""
    files = [function.__code__.co_filename for function in _functions_of(kind)]
    if not files:
        module = sys.modules.get(kind.__module__)
        files = [
            getattr(module, "__file__", None)
            or ("" if kind.__module__ == "__main__" else "<frozen")
        ]
    return any(map(is_own_code, files))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that code uses, and the functions in it; those of attributes too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """The names of global variables that code uses, and the functions in it."""
    yield from sorted(
        {one.argval for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)


# ---- what they hold ------------------------------------------------------------------------------


def copies_of(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """An object that a call may change, with a copy of it; and the same of each that it contains.

    Args:
        value: it; of modules, classes and functions there is none.
        seen: the ids of objects of which there is one already; more come in.
    """
    if id(value) in seen or isinstance(
        value, nn.Module | type | types.FunctionType | types.ModuleType
    ):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value, (value._version, value.detach().clone())
        return
    if (restore := _restoring(value)) is not None:
        yield value, restore
        return
    if _is_own(type(value)) or isinstance(value, types.SimpleNamespace):
        slots = slots_of(value)
        yield value, functools.partial(_set_slots, value, slots)
        for inner in slots.values():
            yield from copies_of(inner, seen)
        yield from copies_of(getattr(value, "__dict__", None), seen)
    if isinstance(value, dict | list | set | deque):
        yield value, dict(value) if isinstance(value, dict) else list(value)
    if isinstance(value, dict | list | set | deque | tuple):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from copies_of(inner, seen)


def _restoring(value: Any) -> Callable[[], Any] | None:
    """What gives a generator of random numbers, or an array of numpy, what it holds now; None
    for anything else.
    """
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    kind = type(value).__module__.partition(".")[0], type(value).__name__
    if kind == ("numpy", "ndarray"):
        is_state = value.flags.writeable and value.nbytes <= _LARGEST  # larger ones are data
        return functools.partial(value.__setitem__, ..., value.copy()) if is_state else None
    if kind == ("numpy", "RandomState"):
        return functools.partial(value.set_state, value.get_state())
    if kind == ("numpy", "Generator"):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _set_slots(value: Any, slots: dict[str, Any]) -> None:
    for name in slots_of(value).keys() - slots.keys():
        object.__delattr__(value, name)
    for name, one in slots.items():
        object.__setattr__(value, name, one)


_LARGEST = 2**26
"""Bytes of an array of numpy up to which it is copied."""

_MOST = 1000
"""Items of a list, or a set, up to which they are looked at for what they hold."""


def held_by(roots: Iterable[Any], known: Collection[int] = ()) -> dict[int, Any]:
    """Objects, and all that they hold in attributes, items and by closure, by their ids; none of
    the ``known`` ids.
    """
    todo, found = list(roots), dict[int, Any]()
    while todo:
        one = todo.pop()
        is_known = id(one) in found or id(one) in known
        if is_known or isinstance(
            one, int | float | complex | str | bytes | type | types.ModuleType | None
        ):
            continue
        found[id(one)] = one
        is_dict = isinstance(one, dict) and type(one).__module__ in (
            "builtins",
            "collections",
        )  # others may load items
        if (is_dict or isinstance(one, list | tuple | set | frozenset)) and len(one) <= _MOST:
            todo += one.values() if isinstance(one, dict) else one
        if isinstance(one, functools.partial):
            todo += one.func, one.args, one.keywords
        if isinstance(one, types.MethodType):
            todo += one.__func__, one.__self__
        if isinstance(one, functools._lru_cache_wrapper):  # with all that it has kept
            todo += gc.get_referents(one)
        todo += (
            closed_over(one)
            if isinstance(one, types.FunctionType)
            else getattr(one, "__dict__", {}).values()
        )
    return found


def functions_in(value: Any) -> list[Any]:
    """The functions that an object holds, and partial ones."""
    return [one for one in _functions_among(held_by([value])) if one is not value]


def _functions_among(held: Mapping[int, Any]) -> list[Any]:
    return [
        one
        for one in held.values()
        if isinstance(one, types.FunctionType | types.MethodType | functools.partial)
    ]


def put_back(value: Any, copied: Any) -> None:
    """Make an object as its copy again."""
    if isinstance(value, torch.Tensor):
        if value._version != copied[0]:
            value.data.copy_(copied[1])
        return
    if callable(copied):
        copied()
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(copied)
    else:
        value.update(copied)
