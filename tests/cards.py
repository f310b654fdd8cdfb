"""Cards: pretended accelerators whose tensors hold real numbers on the CPU.

A tensor of a card tells PyTorch, its C++ too, that it is on ``meta:0`` or ``meta:1``; what it is computed with are
ordinary tensors inside. So an operator that is given tensors of two cards raises as it does on accelerators, the
autograd engine compares devices as it does there, and what comes out can be held against one device.

(`FakeTensorMode` with "cuda" tensors doesn't get through a backward here: for each node the engine asks the guard of
its device for a stream, and a PyTorch for CPUs has no guard for "cuda". For "meta" it has, and computes it in the
caller's thread.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.launch.devices import Device

aten = torch.ops.aten

CPU = torch.device("cpu")


def cards(count: int) -> tuple[Device, ...]:
    """So many of them."""
    return tuple(Device("meta", i) for i in range(count))


class CardTensor(torch.Tensor):
    """A tensor that is on a card, or on the CPU and may be moved to one by ``.data =``.

    Attributes:
        inner: its numbers.
        card: where it pretends to be.
    """

    inner: torch.Tensor
    card: torch.device

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, card: torch.device) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=card,
            dispatch_device=True,
        )
        made.inner, made.card = inner.detach(), card
        return made

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if has_torch_function((self, other)):  # as PyTorch's own asks the modes there are
            handle_torch_function(_set, (self, other), self, other)
        else:
            _set(self, other)

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"CardTensor({self.inner}, {self.card})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _set(tensor: CardTensor, other: torch.Tensor) -> None:
    tensor.inner, tensor.card = _inner(other), other.device


_set.__name__ = "__set__"


class Generator:
    """That of a card."""

    def __init__(self, states: dict[int, torch.Tensor], index: int) -> None:
        self.states, self.index = states, index

    def manual_seed(self, seed: int) -> None:
        self.states[self.index] = torch.Generator().manual_seed(seed).get_state()


class Cards(TorchDispatchMode):
    """While it is on, ``device="meta:1"`` makes tensors of card 1, and what tensors of two cards meet in raises.

    Attributes:
        states: of the generator of each card. (One, PyTorch's for the CPU, draws; the states take turns in it.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Cards:
        torch.get_device_module.cache_clear()  # it remembers the cards of the test before
        torch.meta = self  # type: ignore[attr-defined]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.meta  # type: ignore[attr-defined]
        super().__exit__(*error)

    @property
    def default_generators(self) -> list[Generator]:
        """As an accelerator's module in ``torch`` has them."""
        return [Generator(self.states, i) for i in range(8)]

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """As an accelerator's module in ``torch`` has it."""
        return self.states.setdefault(device.index, torch.Generator().manual_seed(device.index).get_state())

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Likewise."""
        self.states[device.index] = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return computed(func, args, kwargs or {})
        first = next(_tensors(args), None)
        place = torch.device((kwargs or {}).get("device") or (CPU if first is None else first.device))
        if place.type == "cpu":
            return computed(func, args, kwargs or {})
        kept = torch.get_rng_state()
        torch.set_rng_state(self.get_rng_state(place))
        try:
            return computed(func, args, kwargs or {})
        finally:
            self.set_rng_state(torch.get_rng_state(), place)
            torch.set_rng_state(kept)


def on_cards(model: nn.Module) -> nn.Module:
    """The model with parameters and buffers that can be moved to cards; those that are shared stay so."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(CardTensor(p.detach(), CPU), requires_grad=p.requires_grad)
                    for hook in (p._backward_hooks or {}).values():
                        made[id(p)].register_hook(hook)
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = made.setdefault(id(b), CardTensor(b.detach(), CPU))
    return model


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers, as a tensor on the CPU."""
    return _inner(tensor.detach())


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator gives, on the card of its operands.

    Raises:
        RuntimeError: they are on several.
    """
    if func is torch.ops.prim.device.default:
        return args[0].card
    if func is aten._fused_sdp_choice.default:
        return 0  # the way that is made of other operators
    place = _place(func, args, kwargs)
    if (wanted := kwargs.get("device")) is not None:
        place = wanted
    found = func(*_inner(args), **{name: _inner(value) for name, value in kwargs.items()})
    if written := _written(func, args, kwargs):
        return written[0] if len(written) == 1 and not isinstance(found, (list, tuple)) else type(found)(written)
    if func in _HALF_ON_CPU:
        return CardTensor(found[0], place) if place.type != "cpu" else found[0], found[1]
    if place.type == "cpu" and func is not aten.detach.default:
        return found
    return _outer(found, place)


_APART = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
"""Operators between devices."""

_CPU_INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""Their indices may be on the CPU."""

_CPU_VALUE = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
"""Their value may be."""

_HALF_ON_CPU = {aten._pack_padded_sequence.default, aten._pad_packed_sequence.default}
"""Lengths are, and stay, on the CPU."""


def _place(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Where an operator computes."""
    operands = [*_tensors(args), *_tensors(list(kwargs.values()))]
    if not operands:
        return CPU
    place = operands[0].device
    if func in _APART:
        return place
    if func in _HALF_ON_CPU:
        assert operands[1].device == CPU, "lengths have to be on the CPU"
        return place
    if all(t.device == place for t in operands):
        return place
    if func.namespace == "aten" and func._schema.name.startswith("aten::_foreach"):
        return place  # PyTorch goes one by one where devices differ
    places = {t.device for t in operands}
    free = torch.Tag.pointwise in func.tags or func in _CPU_INDEX or func in _CPU_VALUE
    if free and all(not t.dim() or func in _CPU_INDEX for t in operands if t.device == CPU):
        places.discard(CPU)
    if len(places) > 1:
        shown = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in operands)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {shown}")
    (place,) = places
    for t in _written(func, args, kwargs):
        assert t.device == place, f"{func} writes to {t.device} what is on {place}"
    return place


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operator writes and gives back."""
    return [
        args[place] if isinstance(place, int) and place < len(args) else kwargs[name] for place, name in _writes(func)
    ]


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Places and names of these."""
    names = {
        alias: (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
        for alias in a.alias_info.before_set
    }
    returned = (r.alias_info for r in func._schema.returns if r.alias_info is not None)
    return [names[alias] for found in returned if found.is_write for alias in found.before_set]


def _inner(value: Any) -> Any:
    if isinstance(value, CardTensor):
        return value.inner
    if isinstance(value, torch.device):
        return CPU
    return type(value)(map(_inner, value)) if type(value) in (list, tuple) else value


def _outer(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return CardTensor(value, place)
    return type(value)(_outer(part, place) for part in value) if isinstance(value, (list, tuple)) else value


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for part in nest:
            yield from _tensors(part)
