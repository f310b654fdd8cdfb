"""Attributes of modules that are neither parameter, buffer nor module: a counter, a temperature,
a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.launch.processes.call import closed_over
from lockstep.model.inspection.code_names import PLAIN, CodeByName, hash_of
from lockstep.model.inspection.outside_variables import HOOKS, OutsideVariables, copies_of, put_back
from lockstep.model.inspection.rounding import differ
from lockstep.model.inspection.watched import NORMS
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import tensors

_SAYS_HOOKED = "_output_capturing_hooks_installed"
"""What transformers sets where a first forward has registered hooks: it goes with them, which no
checkpoint keeps.
"""

_OF_EVERY_MODULE = {
    *vars(nn.Module()),
    "_compiled_call_impl",
    "dynamo_ctx",
    "forward",
    "__deepcopy__",
    _SAYS_HOOKED,
}
_OF_FULLY_SHARD = "__composable_api_"
"""How the names begin of what PyTorch's ``fully_shard`` keeps in a module."""


def _is_own(name: str) -> bool:
    """Whether an attribute of that name is a person's."""
    return name not in _OF_EVERY_MODULE and not name.startswith(_OF_FULLY_SHARD)


def _is_put_back(name: str) -> bool:
    """Whether that is a person's, or one that a forward may set: hooks, and another forward."""
    return _is_own(name) or name in HOOKS or name in ("forward", _SAYS_HOOKED)


def attribute_prints(model: nn.Module, *, plain: bool = True) -> dict[str, bytes]:
    """A hash of every such attribute: ``{"body.calls": ...}``; not of ``plain`` ones, where that is
    False.

    What can't be pickled is left out, but for functions. The model's own modules and tensors go by
    their names (an RNN lists its weights), other tensors by their values: pickled they hold
    addresses.
    """
    held = [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if _is_own(key)
        and (plain or (type(value) not in PLAIN and not is_plain(value)))
        and not isinstance(value, nn.Module)
    ]
    if not held:  # as most models have it: dp asks twice in each update
        return {}

    named = ((f"{name}.{key}" if name else key, value) for name, key, value in held)
    return prints_of(named, functools.partial(names_in, model))


def names_in(model: nn.Module) -> dict[int, str]:
    """The names of its modules and tensors, by their ids."""
    named: Any = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return {id(one): name for name, one in named}


class _Pickler(CodeByName):
    def __init__(self, file: Any, names: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, held: Any) -> Any:
        """As of any code, and what stands for a tensor or a module."""
        if isinstance(held, torch.Tensor):
            return self._names().get(id(held)) or (tuple(held.shape), str(held.dtype), digest(held))
        return (
            self._names().get(id(held))
            if isinstance(held, nn.Module)
            else super().persistent_id(held)
        )


def prints_of(
    held: Iterable[tuple[str, Any]], names: Callable[[], Mapping[int, str]] = dict
) -> dict[str, bytes]:
    """A hash of each value, by its name; that of a tensor or module whose id is in ``names()``
    is of its name there.
    """
    found, known = (
        {},
        dict[int, bytes | None](),
    )  # (one configuration may be an attribute of all modules)
    names = functools.cache(names)
    for name, value in held:
        if id(value) not in known:
            known[id(value)] = hash_of(value, lambda file: _Pickler(file, names))
        if (its := known[id(value)]) is not None:
            found[name] = its
    return found


def holding_on(model: nn.Module) -> str | None:
    """Why a copy would use the model itself, if it would, or lose something of it."""
    ids = {id(one) for one in (*model.modules(), *model.parameters())}
    for name, module in model.named_modules():
        where = f'"{name}"' if name else "the model"
        held = [
            its for key, its in vars(module).items() if key != "_compiled_call_impl"
        ]  # which copies don't have
        if is_made_by_compile(module):
            return f"{where} is what torch.compile gave: give the model itself, and compile=True"
        hooks = (function for kind in HOOKS for function in getattr(module, kind).values())
        if any(holds_on_to(function, model) for function in (*held, *hooks)):
            return f"a function in {where} holds on to the model it was made in"
        if any(
            isinstance(key, int) and key in ids for of in held if isinstance(of, dict) for key in of
        ):
            return (
                f"a dictionary in {where} has ids of layers or parameters for keys (make "
                "themselves its keys)"
            )
    return None


def is_made_by_compile(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` gave: it has the module inside, which runs
    without its hooks.
    """
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def holds_on_to(function: Any, model: nn.Module) -> bool:
    """Whether a function has closed over something of the model, or has it as a default."""
    held = list(_held_by(function)) if isinstance(function, types.FunctionType) else []
    ids = {id(one) for one in held}
    return bool(ids) and any(
        id(one) in ids for one in (*model.modules(), *model.parameters(), *model.buffers())
    )


def _held_by(function: types.FunctionType, deep: int = 3) -> Iterator[Any]:
    for thing in (
        *closed_over(function),
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ):
        yield getattr(thing, "__self__", thing)  # (of a method its object)
        if isinstance(thing, types.FunctionType) and deep:
            yield from _held_by(thing, deep - 1)


def attribute_place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that an attribute of a model is in, and its key there."""
    around, _, own = name.rpartition(".")
    return vars(model.get_submodule(around)), own


@contextlib.contextmanager
def kept_state(objects: Sequence[Any]) -> Iterator[None]:
    """Put back afterwards what models and losses hold now: buffers, attributes, variables outside
    of them.

    Args:
        objects: modules, and functions or objects of another kind.
    """
    held: list[dict[str, Any]] = []
    roots: list[Any] = []
    for one in objects:
        if isinstance(one, nn.Module):
            held += _holding(one)
            roots.append(OutsideVariables.of_model(one))
        else:
            held += [vars(one)] if hasattr(one, "__dict__") else []
            roots.append(OutsideVariables([one]))
    restore = _kept_of(
        held, {id(p) for one in objects if isinstance(one, nn.Module) for p in one.parameters()}
    )
    with contextlib.ExitStack() as stack:
        for outside in roots:
            stack.enter_context(outside.kept())
        try:
            yield
        finally:
            restore()


def kept_attributes(model: nn.Module) -> Callable[[], None]:
    """What puts back what a model's attributes and buffers hold now, as often as it is called."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    restore = _kept_of(_holding(model), {id(t) for t in (*model.parameters(), *model.buffers())})

    def restore_all() -> None:
        restore()
        for b, its in buffers:
            if b.shape == its.shape and not torch.equal(b, its):
                b.detach().copy_(its)

    return restore_all


def _holding(model: nn.Module) -> list[dict[str, Any]]:
    """The dictionaries that hold its buffers, attributes and hooks, and what parameters have as
    attributes.
    """
    every = [of for module in model.modules() for of in (module._buffers, vars(module))]
    every += map(vars, model.parameters())
    return [
        of for of in every if isinstance(of, dict)
    ]  # those of a TorchScript module are none of Python's


def _kept_of(held: Sequence[dict[str, Any]], seen: set[int]) -> Callable[[], None]:
    """The same of dictionaries of attributes, but for objects whose ids are ``seen``."""
    before = [{name: value for name, value in of.items() if _is_put_back(name)} for of in held]
    copies = [pair for of in before for value in of.values() for pair in copies_of(value, seen)]

    def restore() -> None:
        for value, copied in copies:
            put_back(value, copied)
        for of, then in zip(held, before, strict=True):
            for name in [name for name in of if name not in then and _is_put_back(name)]:
                del of[name]
            # Layers that a first forward makes stay. (Those of a TorchScript module can't be
            # iterated.)
            made = {
                name
                for kind in ("_modules", "_parameters")
                for name in of.get(kind, {}).keys()  # noqa: SIM118
            }
            of.update((name, value) for name, value in then.items() if name not in made)

    return restore


def detached_attributes(model: nn.Module) -> dict[int, Any]:
    """For a copy: what stands for tensors with a history among the attributes, as a forward
    leaves them.
    """
    held = (
        value for module in model.modules() for name, value in vars(module).items() if _is_own(name)
    )
    return {id(t): t.detach().clone() for t in tensors(list(held)) if t.grad_fn is not None}


def attribute_tensors(owners: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors, nests of them and arrays of numpy (copies) among attributes of modules, or
    objects, by their names.
    """
    for way, owner in owners:
        for key, value in getattr(owner, "__dict__", {}).items():
            if not key.startswith("_"):
                is_array = type(value).__name__ == "ndarray" and value.dtype.kind in "biufc"
                its = [torch.from_numpy(value.copy())] if is_array else tensors(value)
                yield from ((f"{way}.{key}".lstrip("."), t) for t in its)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Those of a module's own that are numbers or tensors: they are replaced, seldom written in
    place.
    """
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | torch.Tensor)
    }


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, a switch, or a list, tuple or dictionary of some."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    elif not isinstance(value, list | tuple):
        return isinstance(value, PLAIN)
    return all(isinstance(item, PLAIN) for item in value)


def acting_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers by name, but for the running statistics of normalisation layers, which don't act
    in training.
    """
    norms = {id(b) for m in model.modules() if isinstance(m, NORMS) for b in m.buffers()}
    return {name: b for name, b in model.named_buffers() if id(b) not in norms}


def without_times(
    model: nn.Module, names: Iterable[str], written: Mapping[str, bytes]
) -> list[str]:
    """Attributes but for numbers that a second forward of the same samples has written
    otherwise: a time, say.
    """
    again, places = (
        attribute_prints(model),
        ((name, *attribute_place(model, name)) for name in names),
    )
    return [
        n
        for n, of, own in places
        if again.get(n) == written[n] or not isinstance(of[own], int | float)
    ]


@contextlib.contextmanager
def as_written(model: nn.Module, copied: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Give a model, meanwhile, attributes of these names as a forward of its copy has left them
    there.
    """
    places = [(*attribute_place(model, name), *attribute_place(copied, name)) for name in names]
    kept = [dict(mine) for mine, *_ in places]
    try:
        for mine, own, theirs, its in places:
            mine[own] = theirs[its]
        yield
    finally:
        for (mine, own, *_), then in zip(places, kept, strict=True):
            if own in then:
                mine[own] = then[own]
            else:
                del mine[own]


def loss_depends_on(
    loss: Callable[[], tuple[torch.Tensor, Any]],
    model: nn.Module,
    copied: nn.Module,
    names: Sequence[str],
) -> bool:
    """Whether a loss is another one where attributes of the model itself are those that a copy's
    forward has written.

    It is, too, where it can be computed with one of both only.
    """

    def total() -> torch.Tensor | None:
        try:
            return loss()[0]
        except Exception:
            return None

    before = total()
    with as_written(model, copied, names):
        after = total()
    again = total()  # else it draws random numbers, or counts its calls
    if before is None or after is None or again is None:
        return (before is None) == (again is None) != (after is None)
    return differ([before], [after]) and not differ([before], [again])
