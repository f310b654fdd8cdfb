"""Remembered: what one micro-batch's forward leaves behind for the next, beside gradients.

Micro-batches that overlap can't leave it in the order in which one device would, unless all of it is left and used in
one visit of one stage (running statistics of a batch norm, say). So one micro-batch is watched: what has changed after
its forward, in which visits that was used, and whether layers were called with weights other than their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.build import digest
from lockstep.pipelining.flight import current, tensors_in
from lockstep.seeding import other_states

_OWN = {"_parameters", "_buffers", "_modules", "training"}

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
        self._attributes = {module: _attributes(module) for module in self._names}
        self._weights = {module: dict(module._parameters) for module in self._names}
        self._drawn = other_states()
        self._forward: list[tuple[object, int]] = []
        self._uses = _Uses()
        self._swapped: str | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What the forward of that micro-batch runs in."""
        compiled = {inner for module in self._names if _is_compiled(module) for inner in module.modules()}
        hooks = [m.register_forward_pre_hook(self._look) for m in self._names if m not in compiled]
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
            after = _attributes(module)
            changed = next((key for key in after if not _alike(before.get(key, _MISSING), after[key])), None)
            if changed is not None:
                return f'forward sets "{self._full(module, changed)}", which another micro-batch would overwrite'
        if self._swapped is not None:
            return f'"{self._swapped}" is called with weights that others don\'t have'
        if not _same_drawn(self._drawn, other_states()):
            return "forward draws from Python's or numpy's random, whose order would be left to chance"
        return None

    def _full(self, module: nn.Module, name: str) -> str:
        return f"{self._names[module]}.{name}".lstrip(".")

    def _visits(self, module: nn.Module, calls: Mapping[nn.Module, set[int]]) -> set[int]:
        """Those of the module, or of the nearest one around it that was called."""
        modules = {name: m for m, name in self._names.items()}
        words = self._names[module].split(".")
        for length in range(len(words), -1, -1):
            around = modules.get(".".join(words[:length]))
            if around is not None and around in calls:
                return calls[around]
        return set()


class _Uses(TorchFunctionMode):
    """In which visits of the forward the tensors of each storage were given to a function, and which backward needs.

    Attributes:
        saved: the storages that were kept for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, set[int]] = {}
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
        flight = current()
        if flight is not None:
            for nest in (*args, *kwargs.values()):
                for tensor in tensors_in(nest):
                    self._of.setdefault(_storage(tensor), set()).add(len(flight.seen))
        return func(*args, **kwargs)


def _storage(tensor: torch.Tensor | None) -> int:
    """What tells the memory of a tensor from that of others; 0 where it has none of its own."""
    if tensor is None or tensor.layout != torch.strided:
        return 0
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


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
    for name, contents in _attributes(module).items():
        for tensor in contents if isinstance(contents, list) else [contents]:
            if isinstance(tensor, torch.Tensor):
                yield "tensor", name, tensor


def _is_compiled(module: nn.Module) -> bool:
    """Whether a hook would have it compiled again."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


_MISSING = object()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        key: _contents(value)
        for key, value in vars(module).items()
        if key not in _OWN and not key.endswith("_hooks") and "_hooks_" not in key
    }


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return [value, *value.values()]
    if isinstance(value, list | set):
        return [value, *value]
    return value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one[1:], other[1:]))
    if one is other:
        return True
    plain = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _same_drawn(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] != other[0]:
        return False
    if one[1] is None or other[1] is None:
        return True
    return bool((one[1][1] == other[1][1]).all()) and tuple(one[1][2:]) == tuple(other[1][2:])
