"""Replicate: one module per device, whose gradients come back to the original.

``torch.nn.parallel.replicate`` needs GPUs, copies the parameters even where the device already
holds them, and gives replicas without ``parameters()``. Here slots share the memory of the
parameters: nothing is copied. Replicas are made anew for each forward, so that whatever was changed
in the module is seen; an ordinary module of a replica costs the copy of a few dictionaries.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.launch.devices import Devices, parse
from lockstep.parallel import target_devices
from lockstep.tensors.pytree import is_lazy

M = TypeVar("M", bound=nn.Module)

_BARE = frozenset(vars(nn.Module()))


def replicate(network: M, devices: Devices, detach: bool = False) -> list[M]:
    """Make a replica of ``network`` for each device.

    The parameters of a replica are no leaves: they share the original's memory where the device
    already holds it (CPU devices always do), are copies elsewhere, and their gradients are summed
    into the original's. Buffers of replica 0 are the original's, if those are on its device, so
    that what it updates stays; the other replicas have copies. Modules and parameters that occur in
    several places do so in the replicas too. Hooks, and attributes that are neither modules nor
    tensors of the module, are shared. Attributes that are parts of the module, lists of them, and
    methods are those of the replica; what holds them in other ways (a dict, a function) is shared.

    Args:
        network: the original.
        devices: as ``lockstep.launch.devices.parse`` reads them, or a list.
        detach: cut the gradients off from the original.

    Raises:
        InputError: something in it can't be replicated; the message names it.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    places = [device.torch for device in parse(devices)]
    followed, own = tensors_of(network)
    return replicas_of(network, places, followed, _spread(followed, places, detach), own)


def tensors_of(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is the same in all replicas (parameters, and buffers that want gradients), and
    other buffers.
    """
    followed: dict[Tensor, None] = {}
    own: dict[Tensor, None] = {}
    for name, module in network.named_modules():
        _refuse_special(module, name or type(module).__name__)
        for parameter in module._parameters.values():
            if parameter is not None:
                followed[parameter] = None
        for buffer in module._buffers.values():
            if buffer is None:
                continue
            if buffer.requires_grad:
                followed[buffer] = None
            else:
                own[buffer] = None

    return list(followed), list(own)


def replicas_of(
    network: M,
    places: Sequence[torch.device],
    followed: Sequence[Tensor],
    copies: Sequence[Sequence[Any]],
    own: Sequence[Tensor],
) -> list[M]:
    """Return a replica for each place.

    Args:
        network: the original.
        places: of the replicas.
        followed: tensors of the original.
        copies: for each replica what it has in the place of these.
        own: other buffers: the first replica has the original's, and the others have copies.
    """
    modules = [(module, _attributes(module)) for module in network.modules()]
    replicas = []
    for number, place in enumerate(places):
        known: dict[int, Any] = dict(zip(map(id, followed), copies[number], strict=True))
        for buffer in own:
            mine = buffer
            if number or buffer.device != place:
                mine = buffer.detach().to(place, copy=True)
            known[id(buffer)] = mine
        for module, _ in modules:
            known[id(module)] = _shell(module)
        for module, attributes in modules:
            _fill(known[id(module)], module, attributes, known)
        replicas.append(known[id(network)])

    return replicas


def _refuse_special(module: nn.Module, name: str) -> None:
    """Refuse a module that replicas can't be made of."""
    if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
        raise InputError(
            f"{name} was compiled by torch.compile or torch.jit, and can't be replicated: give the "
            "original module"
        )
    # It would compute with the original's tensors.
    if vars(module).get("_compiled_call_impl") is not None:
        raise InputError(
            f"{name} was compiled in place, by its compile(), for itself alone: leave that out, "
            "and compile functions that its forward calls"
        )
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and is_lazy(tensor):
            raise InputError(
                f"{name} ({type(module).__name__}) has uninitialized parameters, and can't be "
                "replicated: run the module once before"
            )


def _shell(module: nn.Module) -> Any:
    """Return a module of the same type and attributes."""
    made = object.__new__(type(module))
    object.__setattr__(made, "__dict__", {**vars(module), "_is_replica": True})
    return made


def _fill(
    replica: nn.Module,
    module: nn.Module,
    attributes: list[tuple[str, Any]],
    known: Mapping[int, Any],
) -> None:
    """Give a replica its own parts.

    Args:
        replica: a shell of the module.
        module: the original.
        attributes: its attributes that may hold parts of it.
        known: the replica's modules and tensors by the id of the original's.
    """
    inside = vars(replica)
    for kind in ("_parameters", "_buffers", "_modules"):
        parts = {}
        for key, part in vars(module)[kind].items():
            parts[key] = None if part is None else known[id(part)]
        inside[kind] = parts

    for key, value in attributes:
        inside[key] = _of_replica(value, known)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes that may hold a part of the module: not those that every module has.

    With ``self.forward = self.forward_impl`` or ``self.blocks = [self.a, self.b]`` a replica would
    compute with the original's layers, in all threads at once, and write into their buffers.
    """
    return [(key, value) for key, value in vars(module).items() if key not in _BARE]


def _of_replica(value: Any, known: Mapping[int, Any]) -> Any:
    """Return an attribute with the replica's parts in the place of the original's.

    A list without parts of the module stays the same object.

    Args:
        value: of the original.
        known: the replica's modules and tensors by the id of the original's.
    """
    if type(value) is types.MethodType:
        owner = known.get(id(value.__self__), value.__self__)
        return types.MethodType(value.__func__, owner)
    if type(value) is not list:
        return known.get(id(value), value)

    changed = [known.get(id(part), part) for part in value]
    return value if all(map(operator.is_, value, changed)) else changed


def _spread(
    tensors: list[Tensor],
    places: list[torch.device],
    detach: bool,
) -> list[Sequence[Tensor]]:
    """Return for each place the tensors as its replica has them.

    Gradients are summed, unless they are cut off.
    """
    if not tensors:
        return [() for _ in places]

    is_cuda = all(place.type == "cuda" for place in places)
    is_spread = len(set(places)) == len(places)
    is_first = all(tensor.device == places[0] for tensor in tensors)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        if is_cuda and is_spread and is_first:
            # Few large copies instead of many small ones.
            from torch.nn.parallel._functions import Broadcast

            flat = Broadcast.apply([place.index for place in places], *tensors)  # type: ignore[no-untyped-call]
        else:
            flat = _Spread.apply(places, *tensors)  # type: ignore[no-untyped-call]

    count = len(tensors)
    return [flat[start : start + count] for start in range(0, len(flat), count)]


class _Spread(torch.autograd.Function):
    """Tensors as each replica sees them; backward sums the replicas' gradients.

    Where the memory is shared, so is the version: autograd notices what is written between forward
    and backward.
    """

    @staticmethod
    def forward(ctx: Any, places: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Give the tensors of the first replica, then those of the next ..."""
        ctx.homes = [tensor.device for tensor in tensors]
        ctx.set_materialize_grads(False)
        spread: list[Tensor] = []
        unwanted: list[Tensor] = []
        for place in places:
            wanted = ctx.needs_input_grad[1:]
            for tensor, is_wanted in zip(tensors, wanted, strict=True):
                copy = target_devices.move(tensor.detach(), place)
                spread.append(copy)
                if not is_wanted:
                    unwanted.append(copy)
        ctx.mark_non_differentiable(*unwanted)
        return tuple(spread)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients in the order of the replicas, so that the same bits come each time."""
        count = len(ctx.homes)
        sums: list[Tensor | None] = [None] * count
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            number = i % count
            moved = target_devices.move(grad, ctx.homes[number])
            so_far = sums[number]
            sums[number] = moved if so_far is None else so_far + moved
        return None, *sums
