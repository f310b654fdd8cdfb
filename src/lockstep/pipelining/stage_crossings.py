"""Crossings: what a forward has set when it goes from one stage to another, be it that it puts it back later.

A reference pass with the adapters off leaves a model as it was, and yet no other micro-batch may compute meanwhile::

    self.a.on = self.b.on = False
    before = self.b(self.a(x))        between a and b another micro-batch takes its turn on a's stage
    self.a.on = self.b.on = True

On one stage there is never more than one micro-batch, and a turn ends only where one goes on to another stage. So what
a layer sets and puts back within its own call harms nobody; what is other at a crossing than it was before does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.pipelining.module_contents import MISSING, alike, attributes, holds_hooks, joined
from lockstep.tensors.digest import digest


class _Buffer(NamedTuple):
    """A buffer as it was: what tells at once that nobody wrote to it, and its digest."""

    tensor: torch.Tensor | None
    writes: int
    digest: object


class Crossings:
    """Looks at a model whenever one micro-batch, which others don't overlap, goes to another stage.

    Args:
        model: which computes it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        self._ours: set[int] = set()
        self._before: dict[str, Any] = {}
        self._buffers: dict[tuple[nn.Module, str], _Buffer] = {}
        self._data: dict[nn.Parameter, tuple[str, torch.Tensor]] = {}
        self._passed: dict[str, None] = {}  # in the order in which they were seen

    def begin(self, ours: Iterable[int] = ()) -> None:
        """Before the forward.

        Args:
            ours: the numbers of hooks that are there only because somebody looks.
        """
        self._ours = set(ours)
        self._before = dict(self._state())
        self._buffers = {
            (module, name): _Buffer(tensor, _writes(tensor), digest(tensor))
            for module in self._modules
            for name, tensor in module._buffers.items()
        }
        self._data = {
            parameter: (joined(around, name), parameter.detach())
            for module, around in self._modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and not _is_unheld(parameter)
        }

    def look(self) -> None:
        """At a crossing."""
        with torch._C.DisableTorchFunction():  # whoever notes what forward uses is not to take this for a use
            self._passed.update(dict.fromkeys(self._changed()))
            self._passed.update(dict.fromkeys(self._changed_buffers()))

    def why(self, *, standing: bool = True) -> str | None:
        """After it: why no other micro-batch may overlap, or None.

        Args:
            standing: whether what was set to stay counts too (not for buffers: a layer may move those of its own).
        """
        stands = set(self._changed())
        moved = set(self._changed_buffers())
        for what in self._passed:
            if what in moved or (what in stands and not standing):
                continue
            if what.endswith(_HOOKS):
                return f'forward adds or removes hooks of "{what[: -len(_HOOKS)]}", which other micro-batches come by'
            if what in stands:
                return f'forward sets "{what}", which another micro-batch would overwrite'
            return f'forward sets "{what}" and puts it back, and another micro-batch would see it in between'
        return None

    def _changed(self) -> Iterator[str]:
        now = dict(self._state())
        for what in dict.fromkeys((*self._before, *now)):
            if not alike(self._before.get(what, MISSING), now.get(what, MISSING)):
                yield what
        yield from self._changed_data()

    def _changed_buffers(self) -> Iterator[str]:
        for (module, name), before in self._buffers.items():
            now = module._buffers.get(name)
            same = now is before.tensor and _writes(now) == before.writes
            if not same and digest(now) != before.digest:
                yield joined(self._modules[module], name)

    def _changed_data(self) -> Iterator[str]:
        """The parameters whose values lie elsewhere, and are others there."""
        for parameter, (name, before) in self._data.items():
            if _memory(parameter) != _memory(before) and digest(parameter) != digest(before):
                yield f"{name}.data"

    def _state(self) -> Iterator[tuple[str, Any]]:
        """All that a model is beside the values of its tensors, under the words that it is said in."""
        for module, around in self._modules.items():
            for name, value in attributes(module).items():
                yield joined(around, name), value
            yield joined(around, "training"), module.training
            for name, inner in module._modules.items():
                yield joined(around, name), inner
            for name, parameter in module._parameters.items():
                full = joined(around, name)
                yield full, parameter
                if parameter is not None:
                    yield f"{full}.requires_grad", parameter.requires_grad
            hooks = (held for name, held in vars(module).items() if holds_hooks(name) and isinstance(held, dict))
            if theirs := {number for held in hooks for number in held} - self._ours:
                yield around + _HOOKS, [None, *sorted(theirs)]


_HOOKS = " (hooks)"


def _is_unheld(parameter: nn.Parameter) -> bool:
    """Whether it has no values yet, or none that lie in one place."""
    return isinstance(parameter, nn.UninitializedParameter) or parameter.layout != torch.strided


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where its values lie."""
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tensor.shape, tensor.stride()


def _writes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version
