"""Remembered: what one micro-batch's forward leaves behind for the next, beside gradients.

Micro-batches that overlap can't leave it in the order in which one device would, unless all of it is left and used in
one visit of one stage (running statistics of a batch norm, say). So one micro-batch is watched: what has changed after
its forward, in which visits that was used, whether layers were called with weights other than their own, and what was
set only for a while (`stage_crossings`).

A model may begin with that later. So each update whose micro-batches do overlap is looked at from outside (`Begun`),
which costs next to nothing: has anything changed that did not while a micro-batch was watched?
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lockstep.pipelining.hidden_state import prints
from lockstep.pipelining.microbatch import current
from lockstep.pipelining.module_contents import MISSING, OWN, alike, attributes, contents, is_plain, joined, values
from lockstep.pipelining.stage_crossings import Crossings
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import tensors
from lockstep.tensors.seeding import other_states, same_others

_LARGE = 1 << 22
"""Elements of a weight from which on writing to it is seen by PyTorch's count of writes alone."""


class _Held(NamedTuple):
    """A tensor that a module holds."""

    kind: str
    module: nn.Module
    name: str
    tensor: torch.Tensor
    value: object
    writes: int
    storage: int

    def now(self) -> torch.Tensor | None:
        """What is held by that name now."""
        return self.module._buffers[self.name] if self.kind == "buffer" else self.tensor


class Remembered:
    """The state of a model before a micro-batch.

    Args:
        model: which is to compute one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._held = [
            _Held(kind, module, name, tensor, _value(kind, tensor), _writes(tensor), _storage(tensor))
            for module in self._names
            for kind, name, tensor in _tensors_of(module)
        ]
        self._attributes = {module: attributes(module) for module in self._names}
        self._prints = prints(self._names)
        self._weights = {module: dict(module._parameters) for module in self._names}
        self._drawn = other_states()
        self._forward: list[tuple[object, int]] = []
        self._uses = _Uses({id(h.tensor): self._full(h.module, h.name) for h in self._held if h.kind == "parameter"})
        self._crossings = Crossings(model)
        self._swapped: str | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What the forward of that micro-batch runs in."""
        compiled = {inner for module in self._names if _is_compiled(module) for inner in module.modules()}
        hooks = [m.register_forward_pre_hook(self._look) for m in self._names if m not in compiled]
        self._crossings.begin(hook.id for hook in hooks)
        try:
            with contextlib.ExitStack() as stack:
                if not compiled:  # a compiler would take our mode and hooks into what it makes
                    stack.enter_context(self._uses)
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._uses.save, _as_it_is))
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._forward = [(_value(held.kind, held.now()), _writes(held.tensor)) for held in self._held]

    def crossed(self) -> None:
        """The micro-batch goes from one stage to another."""
        self._crossings.look()

    def _look(self, module: nn.Module, args: Any) -> None:
        """See whether a module is called with other weights, as ``torch.func.functional_call`` does."""
        own = self._weights[module]
        if self._swapped is None and any(p is not own.get(name) for name, p in module._parameters.items()):
            self._swapped = self._names[module]

    def why_in_turn(self, calls: Mapping[nn.Module, set[int]]) -> str | None:
        """After the backward: why micro-batches can't overlap, or None.

        Args:
            calls: for each module the visits of the forward in which it was called.
        """
        for held, (between, writes) in zip(self._held, self._forward, strict=True):
            now = held.now()
            what = f'{held.kind} "{self._full(held.module, held.name)}"'
            if _value(held.kind, now) != between:
                return f"{what} is written in backward"
            if between == held.value:
                continue
            if held.kind == "buffer" and len(self._visits(held.module, calls)) != 1:
                return f"{what} is written by more than one stage, or more than once"
            if len(self._uses.of(held.storage) | self._uses.of(_storage(now))) > 1:
                return f"{what} is written by one stage and used by another, or later"
            if writes != held.writes and held.storage in self._uses.saved:
                return f"{what} is written in forward, and backward needs it as it was"
        for module, before in self._attributes.items():
            after = attributes(module)
            changed = next((key for key in after if not alike(before.get(key, MISSING), after[key])), None)
            if changed is not None:
                return f'forward sets "{self._full(module, changed)}", which another micro-batch would overwrite'
        deeper = prints(self._names)
        for (module, key), was in self._prints.items():
            if deeper.get((module, key)) != was:
                return f'forward changes what "{self._full(module, key)}" holds, which is one for all micro-batches'
        if self._swapped is not None:
            return f'"{self._swapped}" is called with weights that others don\'t have'
        if self._uses.switched is not None:
            return f'forward switches "{self._uses.switched}.requires_grad", which holds for other micro-batches too'
        if (why := self._crossings.why()) is not None:
            return why
        if not same_others(self._drawn, other_states()):
            return "forward draws from Python's or numpy's random, whose order would be left to chance"
        return None

    def begun(self) -> Begun:
        """What looks at later updates; the tensors that this forward wrote to may be written to in those too."""
        pairs = zip(self._held, self._forward, strict=True)
        return Begun(self._names, {(h.module, h.name) for h, (between, _) in pairs if between != h.value})

    def _full(self, module: nn.Module, name: str) -> str:
        return joined(self._names[module], name)

    def _visits(self, module: nn.Module, calls: Mapping[nn.Module, set[int]]) -> set[int]:
        """Those of the module, or of the nearest one around it that was called."""
        modules = {name: m for m, name in self._names.items()}
        words = self._names[module].split(".")
        for length in range(len(words), -1, -1):
            around = modules.get(".".join(words[:length]))
            if around is not None and around in calls:
                return calls[around]
        return set()


class Begun:
    """What a model has begun to change in updates that are not watched.

    Not seen: what lies deeper than in a list or dict that a module holds, and what isn't in PyTorch's count of writes.

    Args:
        names: of the model's modules.
        written: modules and names of the tensors that may be written to; buffers among them may be replaced.
    """

    def __init__(self, names: Mapping[nn.Module, str], written: set[tuple[nn.Module, str]]) -> None:
        self._modules = dict(names)
        self._written = written
        self._holders = [held for module in names for held in (vars(module), module._buffers)]
        self._objects: list[Any] = []  # all that the holders hold
        self._before: list[dict[str, Any]] = []  # under which names
        self._containers: list[tuple[str, Any]] = []
        self._contents: list[list[Any]] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._writes: list[int] = []

    def look(self) -> None:
        """Before an update."""
        objects = self._held()
        if not self._before or not _identical(objects, self._objects):
            self._look_inside()
        self._objects = objects
        self._contents = [list(values(one)) for _, one in self._containers]
        self._writes = [tensor._version for _, tensor in self._tensors]

    def _held(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._holders)))

    def _look_inside(self) -> None:
        """Find the lists, dicts and tensors that modules hold; between updates they are seldom other ones."""
        self._before = [dict(held) for held in self._holders]
        self._containers, self._tensors = [], []
        for module, name in self._modules.items():
            for _, own, tensor in _tensors_of(module):
                if (module, own) not in self._written and not tensor.is_inference():
                    self._tensors.append((joined(name, own), tensor))
            for own, value in vars(module).items():
                if is_plain(own) and isinstance(value, dict | list | set):
                    self._containers.append((joined(name, own), value))

    @property
    def writes(self) -> bool:
        """Whether each update writes something: then none can be computed again."""
        return bool(self._written)

    def expects(self, name: str) -> bool:
        """Whether that may change: a tensor that the forward which was watched wrote to."""
        return any(name == joined(self._modules[module], own) for module, own in self._written)

    def changed(self) -> str | None:
        """After it: the name of what has changed, or None."""
        if not _identical(self._held(), self._objects):
            for i, (held, were) in enumerate(zip(self._holders, self._before, strict=True)):
                if (name := self._changed_in(i, held, were)) is not None:
                    return name
        for (name, container), before in zip(self._containers, self._contents, strict=True):
            now = list(values(container))
            if len(now) != len(before) or not all(map(alike, now, before)):
                return name
        pairs = zip(self._tensors, self._writes, strict=True)
        return next((name for (name, tensor), writes in pairs if tensor._version != writes), None)

    def _changed_in(self, number: int, held: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
        module, name = list(self._modules.items())[number // 2]
        may = {own for one, own in self._written if one is module} if held is module._buffers else OWN
        for own, value in held.items():
            if own in may or not is_plain(own):
                continue
            if not alike(contents(before.get(own, MISSING)), contents(value)):
                return joined(name, own)
        return None


class _Uses(TorchFunctionMode):
    """In which visits of the forward the tensors of each storage were given to a function, and which backward needs.

    Args:
        parameters: their names by their ids.

    Attributes:
        saved: the storages that were kept for backward.
        switched: the name of a parameter that was told whether it takes gradients, be it what it was told before.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._parameters = parameters
        self.switched: str | None = None
        self._of: dict[int, set[int]] = {}
        self._seen: dict[int, StorageWeakRef] = {}  # so that no later storage is taken for one that is gone
        self.saved: set[int] = set()

    def of(self, storage: int) -> set[int]:
        """The visits, by their numbers from 1."""
        return self._of.get(storage, set()) if storage else set()

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what is kept for backward, which needs it as it is."""
        self.saved.add(_storage(tensor))
        return tensor.detach()  # itself would be held by the graph that it holds

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SWITCHES and self.switched is None:
            self.switched = self._parameters.get(id(args[0]))
        flight = current()
        if flight is not None:
            for nest in (*args, *kwargs.values()):
                for tensor in tensors(nest):
                    if (storage := _storage(tensor)) not in self._seen and storage:
                        self._seen[storage] = _weak(tensor)
                    self._of.setdefault(storage, set()).add(len(flight.seen))
        return func(*args, **kwargs)


_SWITCHES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _identical(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _storage(tensor: torch.Tensor | None) -> int:
    """What tells the storage of a tensor from all that there are; 0 where it has none of its own.

    (Not the address of its memory, which temporary tensors hand on to one another.)
    """
    if tensor is None or tensor.layout != torch.strided:
        return 0
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _value(kind: str, tensor: torch.Tensor | None) -> object:
    """What tells whether a tensor was written to."""
    if tensor is None or kind == "buffer":
        return digest(tensor)
    return _writes(tensor), digest(tensor) if tensor.numel() <= _LARGE else None


def _writes(tensor: torch.Tensor) -> int:
    """PyTorch's count of writes; what a kernel of its own or ``.data`` wrote isn't in it."""
    return 0 if tensor.is_inference() else tensor._version


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Kind and name of each tensor that a module holds itself; for those of a list, or a dict, its name."""
    yield from (("buffer", name, b) for name, b in module._buffers.items() if b is not None)
    yield from (("parameter", name, p) for name, p in module._parameters.items() if p is not None)
    for name, value in attributes(module).items():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield "tensor", name, tensor


def _is_compiled(module: nn.Module) -> bool:
    """Whether a hook would have it compiled again."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
