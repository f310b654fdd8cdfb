"""Layers: a model's modules, told by hooks which stage they are on; on accelerators they are there,
and inputs follow.

On slots of the CPU nothing moves: a hook only tells the flight of this thread whose turn it needs.
On accelerators parameters are moved once; a hook moves what a module is given, and a mode (see
``transfer``) what meets between modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.devices import Device
from lockstep.model.inspection import is_made_by_compile
from lockstep.pipelining import transfer
from lockstep.pipelining.device_map import modules_around
from lockstep.pipelining.microbatch import current
from lockstep.pipelining.transfer import Moving
from lockstep.tensors.common_memory import common_memory_kept, tensors_of
from lockstep.tensors.placing import place_tensor
from lockstep.threads import recompute


class Layers:
    """A model with hooks, which is changed in place.

    Args:
        model: whose layers they are.
        stage_of: the stage of each name, as ``device_map.stage_of`` gives it.
        devices: of each stage.

    Attributes:
        moves: whether stages are on accelerators that differ.

    Raises:
        StrategyError: a compiled module is on several stages, or a scripted one on any.
    """

    def __init__(
        self, model: nn.Module, stage_of: Mapping[str, int], devices: Sequence[Device]
    ) -> None:
        self.moves = len({device.torch for device in devices}) > 1
        self._places = places = [device.torch for device in devices]
        # What holds something of another stage only hands on: its own code runs on whichever stage
        # it comes to.
        mixed = {
            around
            for name, stage in stage_of.items()
            for around in modules_around(name)
            if stage_of.get(around, stage) != stage
        }
        stage_of = {**stage_of, **_wholes(model, stage_of)}
        modules = dict(model.named_modules())
        for name, module in modules.items():
            in_compiled = any(
                is_made_by_compile(modules[around]) for around in modules_around(name)
            )
            if name in stage_of and name not in mixed and not in_compiled:
                stage = stage_of[name]
                place = places[stage] if self.moves else None
                arriving = _Hook(functools.partial(_arriving, stage, place))
                module.register_forward_pre_hook(arriving, with_kwargs=True, prepend=True)
                module.register_forward_hook(_Hook(_leaving))
        if self.moves:
            recompute.install(transfer.later)
            transfer.install()
            model.register_forward_pre_hook(
                _Hook(functools.partial(_entering, places)), prepend=True
            )
            model.register_forward_hook(_Hook(_exiting), always_call=True)
        if not devices[0].is_slot:
            place_tensors(
                model, {name: places[stage] for name, stage in stage_of.items()}, places[0]
            )

    def moving(self) -> contextlib.AbstractContextManager[Any]:
        """What a forward and its loss run in."""
        if not self.moves:
            return contextlib.nullcontext()
        flight = current()
        return Moving(self._places, queues=None if flight is None else flight.queues)


def _wholes(model: nn.Module, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of each compiled module, by that of what is in it."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StrategyError(
                f'"{name}" is scripted (torch.jit), so it can\'t be told when it is called: give '
                "the module as it was "
                "before, or take single"
            )
        if is_made_by_compile(module):
            stages = sorted(
                {
                    stage
                    for inner, stage in stage_of.items()
                    if inner.startswith(f"{name}.".lstrip("."))
                }
            )
            if len(stages) > 1:
                which = f'"{name}"' if name else "the model"
                raise StrategyError(
                    f"{which} is compiled in one, and its layers are on stages "
                    f"{', '.join(map(str, stages))}: "
                    "give it one stage, or compile its layers each by itself"
                )
            if stages:
                found[name] = stages[0]
    return found


@torch.no_grad()
def place_tensors(model: nn.Module, places: Mapping[str, torch.device], rest: torch.device) -> None:
    """Move each parameter and buffer to its place, or to ``rest``; one with several names to
    that of the first.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # as ``Module.to`` does
    with common_memory_kept(model):
        for name, tensor in list(tensors_of(model)):
            place = places.get(name, rest)
            if tensor.device != place:
                place_tensor(tensor, place)
    for module in recurrent:
        module._init_flat_weights()  # cuDNN wants its weights in one piece


class _Hook:
    """A hook that isn't copied or pickled with its module: a copy of it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[..., None]]]:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    """What a copy of a hook does."""


def _arriving(
    stage: int,
    place: torch.device | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Before the forward of a module on a stage, where its inputs must be; None where all stages
    are on one device.
    """
    flight = current()
    sent = None
    # (A checkpoint that computes again over several accelerators does so in the one turn that it
    # has.)
    if flight is not None and (place is None or flight.kind == "F"):
        if flight.outer is not None and stage == flight.stage:
            return None
        if (
            flight.queues is not None
            and place is not None
            and flight.stage is not None
            and stage != flight.stage
        ):
            with flight.queues.sending(flight.stage, flight.come_back):
                sent = _moved(place, args, kwargs)
        flight.enter(stage)
        if flight.kind == "F":  # else it is computed again, by a checkpoint
            if flight.marks:
                flight.mark(args)
                flight.mark(kwargs)
            if flight.outer is None:
                flight.outer = module
    return sent if sent is not None or place is None else _moved(place, args, kwargs)


def _moved(place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # (There is no mode where a layer is called by itself.)
    mode = transfer.current() or Moving([place])
    mode.place = place
    return tuple(map(mode.nest_moved, args)), {
        name: mode.nest_moved(value) for name, value in kwargs.items()
    }


def _leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After a module's forward, on whose stage all was that is in it."""
    flight = current()
    if flight is not None and flight.outer is module:
        flight.outer = None
        if flight.marks:
            flight.mark(output)


def _entering(places: list[torch.device], module: nn.Module, args: tuple[Any, ...]) -> None:
    """Before the forward of a whole model that is called outside of a step: what meets in it is
    moved too.
    """
    if transfer.current() is None:
        Moving(places, owner=module).__enter__()


def _exiting(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After it, however it ended."""
    mode = transfer.current()
    if mode is not None and mode.owner is module:
        mode.__exit__(None, None, None)
