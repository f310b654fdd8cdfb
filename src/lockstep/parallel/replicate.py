"""Replicate: one module per device, whose gradients come back to the original.

``torch.nn.parallel.replicate`` needs GPUs, copies the parameters even where the device already holds them, and gives
replicas without ``parameters()``. Here slots share the memory of the parameters: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch.devices import Devices
from lockstep.parallel import module_attributes, target_devices
from lockstep.threads.parametrized import cache_apart

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: Devices, detach: bool = False) -> list[M]:
    """Make a replica of ``network`` for each device.

    The parameters of a replica are no leaves: they share the original's memory where the device already holds it
    (slots always do), are copies elsewhere, and their gradients are summed into the original's. Buffers of replica 0
    are the original's, if those are on its device, so that what it updates stays; the other replicas have copies.
    Modules and parameters that occur in several places do so in the replicas too. Hooks, and attributes that are
    neither modules nor tensors of the module, are shared.

    Args:
        network: the original.
        devices: as ``lockstep.launch.devices.parse`` reads them, or a list.
        detach: cut the gradients off from the original.

    Raises:
        InputError: something in it can't be replicated; the message names the attribute.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    places = [device.torch for device in target_devices.many(devices)]
    names = {id(module): name for name, module in network.named_modules()}
    copies = [{id(module): shell(module, names[id(module)]) for module in network.modules()} for _ in places]
    tensors = _tensors(network, names, places, detach)
    for copied, of in zip(copies, tensors, strict=True):
        for module in network.modules():
            fill(copied[id(module)], module, names[id(module)], copied, of)
    return [copied[id(network)] for copied in copies]


def shell(module: nn.Module, name: str) -> Any:
    """A module of the same type and attributes, through the hook with which PyTorch's own modules take part."""
    called = name or type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{called} was compiled by torch.jit, and can't be replicated: give the module it was made of")
    if hasattr(module, "_orig_mod"):
        raise InputError(f"{called} was compiled by torch.compile: replicate the module itself, and compile replicas")
    refuse_compiled(module, called)
    try:
        made = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InputError(f"{called} ({type(module).__name__}) can't be replicated: {error}") from error
    cache_apart(made)
    return made


def refuse_compiled(module: nn.Module, name: str) -> None:
    """Refuse what ``module.compile()`` was called on.

    Raises:
        InputError: it was: each replica would call the original's code, and so compute with the original's tensors.
    """
    if vars(module).get("_compiled_call_impl") is not None:
        raise InputError(
            f"{name or type(module).__name__} was compiled in place, by its compile(), for itself alone: leave that "
            "out, and compile functions that its forward calls"
        )


def refuse_without_shape(tensor: torch.Tensor | None, name: str) -> None:
    """Refuse what a lazy layer has before its first call.

    Raises:
        InputError: it is that; the message names it.
    """
    if isinstance(tensor, (nn.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise InputError(f"{name} has no shape yet, and can't be replicated: run the module once before")


def _tensors(
    network: nn.Module, names: dict[int, str], places: list[torch.device], detach: bool
) -> list[dict[int, torch.Tensor]]:
    """For each replica its tensor for each parameter and buffer of the original, by the latter's id."""
    alike: list[torch.Tensor] = []  # follow the original: parameters, and buffers that want gradients
    own: list[torch.Tensor] = []  # are written to in training: the other buffers
    for module in network.modules():
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                refuse_without_shape(tensor, f"{names[id(module)]}.{key}".lstrip("."))
    alike.extend(network.parameters())
    for buffer in network.buffers():
        (alike if buffer.requires_grad and not detach else own).append(buffer)
    found: list[dict[int, torch.Tensor]] = []
    for number, copied in enumerate(spread(alike, places, detach)):
        place = places[number]
        of = {id(tensor): copy for tensor, copy in zip(alike, copied, strict=True)}
        for buffer in own:
            at_home = number == 0 and buffer.device == place
            of[id(buffer)] = buffer if at_home else buffer.detach().to(place, copy=True)
        found.append(of)
    return found


def fill(replica: Any, module: nn.Module, name: str, copied: dict[int, Any], of: dict[int, torch.Tensor]) -> None:
    """Put the replica's own modules, parameters and buffers in the place of the original's."""
    for key, child in module._modules.items():
        replica._modules[key] = None if child is None else copied[id(child)]
    for key, parameter in module._parameters.items():
        _set(replica, "_parameters", key, None if parameter is None else of[id(parameter)], name)
    for key, buffer in module._buffers.items():
        replica._buffers[key] = None if buffer is None else of[id(buffer)]
    known = {**of, **copied}
    for key, value in module_attributes.own(replica):
        vars(replica)[key] = module_attributes.of_replica(value, known)


def _set(replica: Any, kind: str, key: str, value: torch.Tensor | None, name: str) -> None:
    if value is not None:
        try:
            setattr(replica, key, value)  # modules that keep lists of their weights (nn.LSTM) listen to this
        except Exception as error:
            where = f"{name}.{key}".lstrip(".")
            raise InputError(f"{where} of {type(replica).__name__} can't be replicated: {error}") from error
        vars(replica).pop(key, None)  # ... and here it is found by parameters() and named_parameters()
    getattr(replica, kind)[key] = value


def spread(tensors: list[torch.Tensor], places: list[torch.device], detach: bool) -> list[Sequence[torch.Tensor]]:
    """For each place the tensors as its replica has them; gradients are summed, unless they are cut off."""
    if not tensors:
        return [() for _ in places]
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        if _can_broadcast(tensors, places):
            from torch.nn.parallel._functions import Broadcast  # few large copies instead of many small ones

            flat = Broadcast.apply([place.index for place in places], *tensors)  # type: ignore[no-untyped-call]
        else:
            flat = _Spread.apply(places, *tensors)  # type: ignore[no-untyped-call]
    return [flat[start : start + len(tensors)] for start in range(0, len(flat), len(tensors))]


def _can_broadcast(tensors: list[torch.Tensor], places: list[torch.device]) -> bool:
    return (
        len(set(places)) == len(places)
        and all(place.type == "cuda" for place in places)
        and all(tensor.device == places[0] for tensor in tensors)
    )


class _Spread(torch.autograd.Function):
    """Tensors as each replica sees them; backward sums the replicas' gradients.

    Where the memory is shared, so is the version: autograd notices what is written between forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, places: list[torch.device], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.homes = [tensor.device for tensor in tensors]
        ctx.set_materialize_grads(False)
        spread = tuple(target_devices.move(tensor.detach(), place) for place in places for tensor in tensors)
        wanted = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for i, copy in enumerate(spread) if not wanted[i % len(wanted)]))
        return spread

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        sums: list[torch.Tensor | None] = []
        for i, home in enumerate(ctx.homes):
            total: torch.Tensor | None = None
            for grad in grads[i :: len(ctx.homes)]:  # in the order of the replicas: the same bits each time
                if grad is not None:
                    moved = target_devices.move(grad, home)
                    total = moved if total is None else total + moved
            sums.append(total)
        return None, *sums
