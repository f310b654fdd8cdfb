"""Replicate: one module per device, whose gradients come back to the original.

``torch.nn.parallel.replicate`` needs GPUs, copies the parameters even where the device already
holds them, and gives replicas without ``parameters()``. Here slots share the memory of the
parameters: nothing is copied. Replicas are made anew for each forward, so that whatever was changed
    in the module is seen; an ordinary module of a replica costs the
copy of a few dictionaries.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch.devices import Devices
from lockstep.parallel import target_devices

M = TypeVar("M", bound=nn.Module)

_BARE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, complex, str, type(None), torch.dtype, torch.device))
_DEPTH = 4
"""How deep in containers is looked for parts of a module; they may hold themselves."""


def replicate(network: M, devices: Devices, detach: bool = False) -> list[M]:
    """Make a replica of ``network`` for each device.

    The parameters of a replica are no leaves: they share the original's memory where the device
    already holds it (slots always do), are copies elsewhere, and their gradients are summed into
    the original's. Buffers of replica 0 are the original's, if those are on its device, so that
    what it updates stays; the other replicas have copies. Modules and parameters that occur in
    several places do so in the replicas too. Hooks, and attributes that are neither modules nor
    tensors of the module, are shared. Attributes that hold parts of the module (a list of layers, a
    method) hold those of the replica; a function that closes over them, or a partial, is shared.

    Args:
        network: the original.
        devices: as ``lockstep.launch.devices.parse`` reads them, or a list.
        detach: cut the gradients off from the original.

    Raises:
        InputError: something in it can't be replicated; the message names it.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    places = [device.torch for device in target_devices.many(devices)]
    followed, own = tensors_of(network)
    return replicas_of(network, places, followed, _spread(followed, places, detach), own)


def tensors_of(network: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is the same in all replicas (parameters, and buffers that want gradients), and other
    buffers.
    """
    followed: dict[torch.Tensor | None, None] = {}
    own: dict[torch.Tensor | None, None] = {}
    for name, module in network.named_modules():
        _refuse_special(module, name)
        followed.update(dict.fromkeys(module._parameters.values()))
        for tensor in module._buffers.values():
            (followed if tensor is not None and tensor.requires_grad else own)[tensor] = None
    return [t for t in followed if t is not None], [t for t in own if t is not None]


def replicas_of(
    network: M,
    places: Sequence[torch.device],
    followed: Sequence[torch.Tensor],
    copies: Sequence[Sequence[Any]],
    own: Sequence[torch.Tensor],
) -> list[M]:
    """A replica for each place, with its ``copies`` where the original has the tensors
    ``followed``.

    Of the other buffers, ``own``, the first has the original's, and the others have copies.
    """
    modules = [(module, name, _attributes(module)) for name, module in network.named_modules()]
    replicas = []
    for number, (place, mine) in enumerate(zip(places, copies, strict=True)):
        known: dict[int, Any] = {
            id(tensor): copy for tensor, copy in zip(followed, mine, strict=True)
        }
        for buffer in own:
            at_home = number == 0 and buffer.device == place
            known[id(buffer)] = buffer if at_home else buffer.detach().to(place, copy=True)
        for module, name, _ in modules:
            known[id(module)] = _shell(module, name)
        for module, _, attributes in modules:
            replica = known[id(module)]
            inside = vars(replica)
            for kind in ("_parameters", "_buffers", "_modules"):
                parts = vars(module)[kind]
                inside[kind] = {
                    key: None if part is None else known[id(part)] for key, part in parts.items()
                }
            inside.update((key, _of_replica(value, known)) for key, value in attributes)
        replicas.append(known[id(network)])
    return replicas


def _refuse_special(module: nn.Module, name: str) -> None:
    called = name or type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{called} was compiled by torch.jit, and can't be replicated: give the module it was "
            "made of"
        )
    if "_orig_mod" in module._modules:
        raise InputError(
            f"{called} was compiled by torch.compile: replicate the module itself, and compile "
            "replicas"
        )
    if (
        vars(module).get("_compiled_call_impl") is not None
    ):  # it would compute with the original's tensors
        raise InputError(
            f"{called} was compiled in place, by its compile(), for itself alone: leave that out, "
            "and compile "
            "functions that its forward calls"
        )
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise InputError(
                f"{called} ({type(module).__name__}) has uninitialized parameters, and can't be "
                "replicated: run the "
                "module once before"
            )


def _shell(module: nn.Module, name: str) -> Any:
    """A module of the same type and attributes."""
    kind = type(module)
    if kind._replicate_for_data_parallel is nn.Module._replicate_for_data_parallel:
        made = kind.__new__(kind)  # as that method does, in a tenth of the time
        object.__setattr__(made, "__dict__", {**vars(module), "_is_replica": True})
        return made
    try:
        return module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InputError(
            f"{name or kind.__name__} ({kind.__name__}) can't be replicated: {error}"
        ) from error


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Those that may hold a part of the module: neither numbers nor words, nor what every module
    has.

    With ``self.forward = self.forward_impl`` or ``self.blocks = [self.a, self.b]`` a replica would
    compute with the original's layers, in all threads at once, and write into their buffers.
    """
    found = []
    for key, value in vars(module).items():
        kinds = map(type, value) if type(value) is tuple else (type(value),)
        if key not in _BARE and not _PLAIN.issuperset(kinds):
            found.append((key, value))
    return found


def _of_replica(value: Any, known: Mapping[int, Any], depth: int = _DEPTH) -> Any:
    """An attribute with the replica's parts in the place of the original's; the same object where
    there are none.

    ``known`` has the replica's modules and tensors by the id of the original's.
    """
    if isinstance(value, (nn.Module, torch.Tensor)):
        return known.get(id(value), value)
    kind = type(value)
    if kind is types.MethodType:
        owner = known.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if not depth or kind not in (list, tuple, dict):
        return value

    inside = list(value.values() if kind is dict else value)
    changed = [_of_replica(part, known, depth - 1) for part in inside]
    if all(one is other for one, other in zip(inside, changed, strict=True)):
        return value
    return dict(zip(value, changed, strict=True)) if kind is dict else kind(changed)


def _spread(
    tensors: list[torch.Tensor], places: list[torch.device], detach: bool
) -> list[Sequence[torch.Tensor]]:
    """For each place the tensors as its replica has them; gradients are summed, unless they are
    cut off.
    """
    if not tensors:
        return [() for _ in places]
    several = len(set(places)) == len(places) and all(place.type == "cuda" for place in places)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        if several and all(tensor.device == places[0] for tensor in tensors):
            from torch.nn.parallel._functions import (
                Broadcast,
            )  # few large copies instead of many small ones

            flat = Broadcast.apply([place.index for place in places], *tensors)  # type: ignore[no-untyped-call]
        else:
            flat = _Spread.apply(places, *tensors)  # type: ignore[no-untyped-call]
    return [flat[start : start + len(tensors)] for start in range(0, len(flat), len(tensors))]


class _Spread(torch.autograd.Function):
    """Tensors as each replica sees them; backward sums the replicas' gradients.

    Where the memory is shared, so is the version: autograd notices what is written between forward
    and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, places: list[torch.device], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.homes = [tensor.device for tensor in tensors]
        ctx.set_materialize_grads(False)
        spread = tuple(
            target_devices.move(tensor.detach(), place) for place in places for tensor in tensors
        )
        wanted = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(copy for i, copy in enumerate(spread) if not wanted[i % len(wanted)])
        )
        return spread

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        homes, sums = ctx.homes, dict[int, torch.Tensor]()
        for start in range(
            0, len(grads), len(homes)
        ):  # in the order of the replicas: the same bits each time
            of_replica = zip(grads[start : start + len(homes)], homes, strict=True)
            new = {
                i: target_devices.move(grad, home)
                for i, (grad, home) in enumerate(of_replica)
                if grad is not None
            }
            if both := sorted(sums.keys() & new.keys()):
                added = torch._foreach_add([sums[i] for i in both], [new[i] for i in both])
                new.update(zip(both, added, strict=True))
            sums.update(new)
        return None, *(sums.get(i) for i in range(len(homes)))
