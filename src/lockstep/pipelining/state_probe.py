"""State probe: watches one micro-batch, which no other overlaps, for what would harm others that
do.

Micro-batches that overlap can't leave anything for the next one in the order in which one device
would, unless all of it is written and used in one visit of one stage (running statistics of a batch
norm, say). Nor may one see what another has set only for a while: a turn ends where a micro-batch
goes on to another stage, so this is looked for there::

    self.a.on = self.b.on = False
    before = self.b(self.a(x))       between a and b another micro-batch takes its turn on a's stage
    self.a.on = self.b.on = True

What a layer sets and puts back within its own call harms nobody, unless it is a variable outside of
the model, or an object that layers of several stages share: these are looked at wherever a function
is called. What isn't found to be harmless is a reason to compute micro-batches in turn.

Attributes, parameters, buffers, modules and hooks are compared as objects, numbers and words as
what they say; lists, dicts and sets by what is in them. What lies deeper (a generator, an object of
a class of one's own, a dict in a dict) has no look from outside, so it is pickled, into a hash.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import StrategyError
from lockstep.model.inspection import OutsideVariables, at_own_calls, hash_of, prints_of
from lockstep.pipelining.microbatch import Flight
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import is_lazy, tensors

_LARGE = 1 << 22
"""Elements of a parameter from which on writing to it is seen by PyTorch's count of writes
alone.
"""

_SETTERS = {
    torch.Tensor.requires_grad_: "requires_grad",
    torch.Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: "data",  # type: ignore[attr-defined]
}
_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type(None))
_NAMED = ("_parameters", "_buffers", "_modules")
"""The dicts of a module whose items a person knows by the name of the module and their own."""


class StateProbe:
    """The state of a model before a micro-batch, and what becomes of it."""

    def __init__(self, model: nn.Module, flight: Flight) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._contents = _Contents(self._names)
        self._prints = prints(self._names)
        self._outside = OutsideVariables.of_model(model)
        self._outside_prints = self._outside.prints()
        self._sharing = _sharing(self._names)
        self._shared_prints = prints_of(self._shared())
        self._held = list(_held_by(self._names))
        self._before = self._forward = [held.value for held in self._held]
        self._required = [held.tensor.requires_grad for held in self._held]
        self._uses = _Uses(flight, {id(held.tensor): held.name for held in self._held})
        self._crossed: dict[
            str, None
        ] = {}  # what was other at a crossing, in the order in which it was seen
        self._apart: dict[str, None] = {}  # the same of what is hashed, within forward
        self._shared_apart: dict[str, None] = {}
        self._is_forward = True
        self._calls = flight.calls = {}
        flight.crossed = self._look

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What the forward of that micro-batch runs in."""
        with contextlib.ExitStack() as stack:
            if not any(
                map(_is_compiled, self._names)
            ):  # a compiler would take our mode and hooks into what it makes
                stack.enter_context(self._uses)
                if self._outside_prints or self._shared_prints:
                    stack.enter_context(at_own_calls(self._look_within, self._watched))
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(self._uses.save, lambda saved: saved)
                )
            try:
                yield
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise StrategyError(
                    "pp: the model's forward takes gradients by torch.func, which can't be "
                    "followed over stages",
                    fix="take them by torch.autograd.grad, or take mp or ddp",
                ) from error
        self._forward = [held.value for held in self._held]
        self._is_forward = False
        for name in (
            self._others()
        ):  # not put back in forward: a counter, say, also one that backward counts down
            self._apart.pop(name, None)

    def _others(self) -> list[str]:
        """The names of what is hashed, within modules or outside, and is other now."""
        own, outside = prints(self._names), self._outside.prints()
        return [*_apart(self._prints, own), *_apart(self._outside_prints, outside)]

    def _watched(self) -> list[Any]:
        return [*self._outside.values(), *(value for value, _ in self._sharing.values())]

    def _shared(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, (value, _) in self._sharing.items()]

    def _look_within(self) -> None:
        """A function is called in forward."""
        with torch._C.DisableTorchFunction():
            self._apart.update(dict.fromkeys(_apart(self._outside_prints, self._outside.prints())))
            self._shared_apart.update(
                dict.fromkeys(_apart(self._shared_prints, prints_of(self._shared())))
            )

    def _look(self) -> None:
        """The micro-batch goes from one stage to another."""
        with torch._C.DisableTorchFunction():  # this is no use of what modules hold
            self._crossed.update(dict.fromkeys(self._contents.changed()))
            self._apart.update(dict.fromkeys(self._others() if self._is_forward else ()))
            for held, required in zip(self._held, self._required, strict=True):
                if (
                    held.tensor.requires_grad != required
                ):  # in a model with compiled layers nothing else sees it
                    self._uses.switched = self._uses.switched or f"{held.name}.requires_grad"

    def why_in_turn(self) -> str | None:
        """Afterwards: why micro-batches can't overlap, or None."""
        for held, before, between in zip(self._held, self._before, self._forward, strict=True):
            what = f'{held.kind} "{held.name}"'
            if held.value != between:
                return f"{what} is written in backward"
            if between == before:
                continue
            if len(self._uses.of(held.tensor) | self._visits(held.module)) != 1:
                return (
                    f"{what} is written in forward, and used on more than one stage, or more "
                    "than once"
                )
            if between[0] != before[0] and _storage(held.tensor) in self._uses.saved:
                return f"{what} is written in forward, and backward needs it as it was"
        for what in self._contents.changed():
            return f'forward sets "{what}", which another micro-batch would overwrite'
        shared = [what for what in self._shared_apart if self._is_of_several_stages(what)]
        for what in (*self._crossed, *self._apart, *shared):
            return (
                f'forward sets "{what}" and puts it back, and another micro-batch would see it '
                "in between"
            )
        after = prints(self._names)
        for what, was in self._prints.items():
            if after.get(what) != was:
                return f'forward changes what "{what}" holds, which is one for all micro-batches'
        for name in self._outside.changed_since(self._outside_prints):
            if self._outside.holds_tensors(name):
                return (
                    f'forward writes tensors to "{name}", which is outside of the model: one '
                    "for all micro-batches"
                )
        if self._uses.switched is not None:
            return f'forward sets "{self._uses.switched}", which holds for other micro-batches too'
        return None

    def _is_of_several_stages(self, what: str) -> bool:
        _, modules = self._sharing[what]
        return len(set[int]().union(*map(self._visits, modules))) > 1

    def written(self) -> set[str]:
        """The names of the tensors that forward wrote to: each micro-batch may."""
        pairs = zip(self._held, self._before, self._forward, strict=True)
        return {held.name for held, before, between in pairs if between != before}

    def _visits(self, module: nn.Module) -> set[int]:
        """Those in which the module was called, or the nearest one around it that was."""
        modules = {name: m for m, name in self._names.items()}
        name = self._names[module]
        while modules[name] not in self._calls and name:
            name = name.rpartition(".")[0]
        return self._calls.get(modules[name], set())


class Begun:
    """What a model begins to change in an update that isn't watched.

    Not seen: what lies deeper than in a list or dict that a module holds, and what isn't in
    PyTorch's count of writes.

    Attributes:
        written: names of the tensors that may be written to.
    """

    def __init__(self, model: nn.Module, written: set[str]) -> None:
        self.written = written
        self._names = {module: name for name, module in model.named_modules()}
        self._note()

    def look(self) -> None:
        """Before an update."""
        if not self._contents.stands:
            self._note()
        self._writes = [_writes(held.tensor) for held in self._held]

    def changed(self) -> str | None:
        """After it: the name of what has changed, or None."""
        if not self._contents.stands and (name := next(self._contents.changed(), None)) is not None:
            return name
        pairs = zip(self._held, self._writes, strict=True)
        return next((held.name for held, before in pairs if _writes(held.tensor) != before), None)

    def _note(self) -> None:
        self._contents = _Contents(self._names)
        self._held = [held for held in _held_by(self._names) if held.name not in self.written]


class _Uses(TorchFunctionMode):
    """In which visits of the forward each tensor that a module holds was given to a function, and
    what backward needs.

    Attributes:
        saved: the storages that were kept for backward.
        switched: what of a parameter was set, whether it takes gradients or where its values lie,
            be it as before.
    """

    def __init__(self, flight: Flight, names: Mapping[int, str]) -> None:
        super().__init__()
        self._flight = flight
        self._names = names  # of the tensors, by their ids
        self._of: dict[int, set[int]] = {}
        self.saved: set[int] = set()
        self.switched: str | None = None

    def of(self, tensor: torch.Tensor) -> set[int]:
        """The visits, by their numbers from 1, in which its storage was used."""
        return self._of.get(_storage(tensor), set())

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what is kept for backward, which needs it as it is."""
        self.saved.add(_storage(tensor))
        return tensor.detach()  # itself would be held by the graph that it holds

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SETTERS and self.switched is None and id(args[0]) in self._names:
            self.switched = f"{self._names[id(args[0])]}.{_SETTERS[func]}"
        for tensor in tensors([*args, *kwargs.values()]):
            self._of.setdefault(_storage(tensor), set()).add(len(self._flight.seen))
        return func(*args, **kwargs)


class _Held(NamedTuple):
    """A tensor that a module holds: as a buffer, as a parameter, or as another attribute."""

    kind: str
    module: nn.Module
    name: str
    tensor: torch.Tensor

    @property
    def value(self) -> tuple[int, object]:
        """What tells whether it was written to: PyTorch's count, and a digest."""
        is_large = self.kind == "parameter" and self.tensor.numel() > _LARGE
        return _writes(self.tensor), None if is_large else digest(self.tensor)


def _held_by(modules: Mapping[nn.Module, str]) -> Iterator[_Held]:
    """Each tensor that modules hold themselves, once; for those of a list, or a dict, its name."""
    seen: set[int] = set()
    for module, around in modules.items():
        attributes: list[tuple[str, str, Any]] = [
            ("buffer", *item) for item in module._buffers.items()
        ]
        attributes += (("parameter", *item) for item in module._parameters.items())
        for name, value in vars(module).items():
            attributes += (("tensor", name, inner) for inner in _inside(value))
        for kind, name, value in attributes:
            if isinstance(value, torch.Tensor) and not is_lazy(value) and id(value) not in seen:
                seen.add(id(value))
                yield _Held(kind, module, _joined(around, name), value)


class _Contents:
    """What modules hold now, beside the values of tensors."""

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._of: list[
            tuple[str, str]
        ] = []  # the module's name, and that of its container; "" for all attributes
        self._held: list[Any] = []
        for module, name in modules.items():
            containers = {
                own: held
                for own, held in vars(module).items()
                if isinstance(held, dict | list | set)
            }
            for own, held in {"": vars(module), **containers}.items():
                self._of.append((name, own))
                self._held.append(held)
        self._copies = [held.copy() for held in self._held]

    @property
    def stands(self) -> bool:
        """Whether nothing is other now, at a glance: a tensor that was replaced by an equal
        number may be missed.
        """
        try:
            return self._held == self._copies
        # what can't be asked whether it is equal, as a tensor of several numbers, is another one
        except Exception:
            return False

    def changed(self) -> Iterator[str]:
        """The names of what is other now."""
        for (module, container), held, copy in zip(self._of, self._held, self._copies, strict=True):
            before, now = (
                one if isinstance(one, dict) else dict(enumerate(one)) for one in (copy, held)
            )
            if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())):
                continue
            for key in {**before, **now}:
                if not _alike(before.get(key, _MISSING), now.get(key, _MISSING)):
                    yield _joined(module, str(key) if container in ("", *_NAMED) else container)


def _apart(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """The names of what is another now."""
    return [name for name, its in before.items() if now.get(name) != its]


def _sharing(modules: Mapping[nn.Module, str]) -> dict[str, tuple[Any, list[nn.Module]]]:
    """Objects that several modules hold, by the first name of each, with these modules."""
    found: dict[int, tuple[str, Any, list[nn.Module]]] = {}
    for module, around in modules.items():
        for name, value in vars(module).items():
            if not isinstance(value, (*_PLAIN, tuple, torch.Tensor, nn.Module)) and not callable(
                value
            ):
                found.setdefault(id(value), (_joined(around, name), value, []))[2].append(module)
    return {name: (value, its) for name, value, its in found.values() if len(its) > 1}


def prints(modules: Mapping[nn.Module, str]) -> dict[str, bytes]:
    """A hash of each attribute that comparing objects says nothing of; of none that can't be
    pickled.
    """
    found: dict[str, bytes] = {}
    for module, around in modules.items():
        for name, value in vars(module).items():
            compared = all(
                isinstance(inner, (*_PLAIN, torch.Tensor, nn.Module)) for inner in _inside(value)
            )
            is_hashed = not compared and not name.endswith("_hooks")
            if is_hashed and (its := hash_of(value, _Pickler)) is not None:
                found[_joined(around, name)] = its
    return found


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return id(value) if isinstance(value, nn.Module) else None  # it has contents of its own


def _inside(value: Any) -> Iterable[Any]:
    """What is in a list or a dict; else the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else (value,)


def _alike(one: Any, other: Any) -> bool:
    """Whether two are the same object, an equal number or word, or a list and its like that hold
    alike things.
    """
    if one is other:
        return True
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other


def _joined(module: str, name: str) -> str:
    """The full name of what a module of that name holds."""
    return f"{module}.{name}".lstrip(".")


def _writes(tensor: torch.Tensor) -> int:
    """PyTorch's count of writes; what a kernel of its own or ``.data`` wrote isn't in it."""
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from all that there are; 0 where it has none of its own.

    (Not the address of its memory, which temporary tensors hand on to one another.)
    """
    if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a hook would have it compiled again."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
