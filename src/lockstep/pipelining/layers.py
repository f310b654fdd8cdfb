"""Layers: a model's modules, told by hooks which stage they are on; on accelerators they are there, and inputs follow.

On slots of the CPU nothing moves: a hook only tells the flight of this thread whose turn it needs. On accelerators
parameters are moved once; a hook moves what a module is given, and a mode what meets between modules (``cat`` of a skip
connection), to the stage that computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.devices import Device
from lockstep.nesting import each
from lockstep.pipelining.flight import current, tensors_in

_here = threading.local()


class Layers:
    """A model with hooks.

    Args:
        model: is changed in place.
        stage_of: the stage of each name, as ``stages.stage_of`` gives it.
        devices: of each stage.

    Attributes:
        moves: whether stages are on accelerators that differ.
    """

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], devices: Sequence[Device]) -> None:
        self.moves = len({device.torch for device in devices}) > 1
        self._places = places = [device.torch for device in devices]
        # What holds something of another stage only hands on: its own code runs on whichever stage it comes to.
        mixed = {
            around
            for name, stage in stage_of.items()
            for around in _around(name)
            if stage_of.get(around, stage) != stage
        }
        for name, module in model.named_modules():
            if name in stage_of and name not in mixed:
                stage = stage_of[name]
                place = places[stage] if self.moves else None
                module.register_forward_pre_hook(_Arriving(stage, place), with_kwargs=True, prepend=True)
                module.register_forward_hook(_Leaving())
        if not devices[0].is_slot:
            place_tensors(model, {name: places[stage] for name, stage in stage_of.items()}, places[0])

    def moving(self) -> contextlib.AbstractContextManager[Any]:
        """What a forward and its loss run in."""
        return _Moving(self._places[0]) if self.moves else contextlib.nullcontext()


def _around(name: str) -> Iterator[str]:
    """The names of the modules that a name lies in: ``""``, ``"a"``, ``"a.b"`` for ``"a.b.c"``."""
    words = name.split(".") if name else []
    for length in range(len(words)):
        yield ".".join(words[:length])


@torch.no_grad()
def place_tensors(model: nn.Module, places: Mapping[str, torch.device], rest: torch.device) -> None:
    """Move each parameter and buffer to its place, or to ``rest``; one with several names to that of the first."""
    for name, p in model.named_parameters():
        if p.device != places[name]:
            p.data = p.data.to(places[name])
            if p.grad is not None:
                p.grad = None
    done: dict[int, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is None:
                continue
            place = places.get(f"{module_name}.{own}".lstrip("."), rest)
            if buffer.device != place:
                done.setdefault(id(buffer), buffer.to(place))
                module._buffers[own] = done[id(buffer)]


class _Hook:
    """A hook that isn't copied or pickled with its module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _unhooked, ()


def _unhooked() -> Callable[..., None]:
    return _nothing


def _nothing(*args: Any) -> None:
    """What a copy of a hook does."""


class _Arriving(_Hook):
    """Before a module's forward.

    Args:
        stage: where the module is.
        place: where its inputs must be, or None where all stages are on one device.
    """

    def __init__(self, stage: int, place: torch.device | None) -> None:
        self._stage = stage
        self._place = place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flight = current()
        if flight is not None:
            stage = self._stage
            if flight.calls is not None and flight.kind == "F":
                flight.enter(stage)
                flight.calls.setdefault(module, set()).add(len(flight.seen))
            if flight.outer is not None and stage == flight.stage:
                return None
            if flight.kind == "B":  # computed again, by a checkpoint
                flight.enter(stage)
            else:
                if stage != flight.stage:
                    flight.enter(stage)
                if flight.marks:
                    flight.mark(args)
                    flight.mark(kwargs)
                if flight.outer is None:
                    flight.outer = module
        return None if self._place is None else self._moved(args, kwargs)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = self._place
        assert place is not None
        mode: _Moving | None = getattr(_here, "mode", None)
        if mode is None:  # called outside of a step
            mode = _Moving(place)
        mode.place = place
        move = mode.moved
        return tuple(_each(move, arg) for arg in args), {name: _each(move, value) for name, value in kwargs.items()}


class _Leaving(_Hook):
    """After a module's forward, on whose stage all was that is in it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        flight = current()
        if flight is not None and flight.outer is module:
            flight.outer = None
            if flight.marks:
                flight.mark(output)


def _each(move: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    # (The stubs of packed sequences know of dtypes only.)
    return each(move, nest, on_packed=lambda packed: packed.to(move(packed.data).device))  # type: ignore[arg-type]


class _Moving(TorchFunctionMode):
    """Operands that meet on different devices are moved to the stage that computes; in place, to the first of them."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.place = place
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __enter__(self) -> _Moving:
        self._before = getattr(_here, "mode", None)
        _here.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _here.mode = self._before
        self._copies.clear()

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the stage that computes; masks and positions, which every layer is given, are copied once."""
        place = self.place
        if tensor.device == place or (tensor.is_cpu and not tensor.dim()):
            return tensor
        with torch._C.DisableTorchFunction():
            if tensor.requires_grad:
                return tensor.to(place, non_blocking=True)
            key = (id(tensor), place)
            kept = self._copies.get(key)
            if kept is None or kept[0] is not tensor or kept[1] != tensor._version:
                kept = tensor, tensor._version, tensor.to(place, non_blocking=True)
                self._copies[key] = kept
            return kept[2]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LEFT:
            found = [t for nest in (*args, *kwargs.values()) for t in _operands(nest)]
            if len(found) > 1:
                place = found[0].device
                if any(t.device != place and (t.dim() or not t.is_cpu) for t in found[1:]):
                    args, kwargs = self._together(func, found[0], args, kwargs)
        return func(*args, **kwargs)

    def _together(
        self, func: Any, first: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in kwargs
        stage, self.place = self.place, first.device if writes else self.place
        try:
            return (
                tuple(each(self.moved, arg, on_packed=_same) for arg in args),
                {key: each(self.moved, value, on_packed=_same) for key, value in kwargs.items()},
            )
        finally:
            self.place = stage


_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"}
_LEFT = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.to_dense}
"""Functions that may have operands on two devices."""


def _same(packed: Any) -> Any:
    return packed


def _operands(nest: Any) -> list[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, (list, tuple)):
        return [t for part in nest for t in tensors_in(part)] if len(nest) < 64 else list(tensors_in(nest))
    return []
