"""A staged model: hooks say which stage each of its modules is on; on accelerators the modules are
there, and inputs follow.

On slots of the CPU nothing moves: a hook only tells the micro-batch of this thread whose turn it
needs. On accelerators parameters are moved once; a hook moves what a module is given, and a mode
(see ``transfer``) what meets between modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.launch.devices import Device
from lockstep.model.compile import refuse_compiled
from lockstep.pipelining import transfer
from lockstep.pipelining.device_map import modules_around
from lockstep.pipelining.microbatch import current
from lockstep.pipelining.transfer import TransferMode
from lockstep.tensors.common_memory import tensors_of
from lockstep.tensors.placing import place_tensor
from lockstep.threads import recompute


class StagedModel:
    """A model with hooks, which is changed in place.

    Args:
        model: whose modules get hooks.
        stage_of: the stage of each name, as ``device_map.stage_of`` gives it.
        devices: of each stage.

    Attributes:
        moves: whether stages are on accelerators that differ.

    Raises:
        StrategyError: a module is compiled by ``torch.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Mapping[str, int],
        devices: Sequence[Device],
    ) -> None:
        self._places = [device.torch for device in devices]
        self.moves = len(set(self._places)) > 1
        refuse_compiled(model)
        mixed = _mixed(stage_of)
        for name, module in model.named_modules():
            if name in stage_of and name not in mixed:
                self._hook(module, stage_of[name])
        if self.moves:
            recompute.install(transfer.later)
            enter = functools.partial(_entering, self._places)
            model.register_forward_pre_hook(enter, prepend=True)
            model.register_forward_hook(_exiting, always_call=True)
        if not devices[0].is_slot:
            places = {name: self._places[stage] for name, stage in stage_of.items()}
            place_tensors(model, places, self._places[0])

    def moving(self) -> contextlib.AbstractContextManager[Any]:
        """Give the context of a forward and its loss, in which what meets is moved."""
        if not self.moves:
            return contextlib.nullcontext()
        microbatch = current()
        queues = None
        if microbatch is not None:
            queues = microbatch.queues
        return TransferMode(self._places, queues=queues)

    def _hook(self, module: nn.Module, stage: int) -> None:
        """Give a module the hooks of its stage."""
        place = None
        if self.moves:
            place = self._places[stage]
        arrive = functools.partial(_arriving, stage, place)
        module.register_forward_pre_hook(arrive, with_kwargs=True, prepend=True)
        module.register_forward_hook(_leaving)


def _mixed(stage_of: Mapping[str, int]) -> set[str]:
    """Find the modules that hold something of another stage.

    They only hand on: their own code runs on whichever stage it comes to.
    """
    found = set()
    for name, stage in stage_of.items():
        for outer in modules_around(name):
            if stage_of.get(outer, stage) != stage:
                found.add(outer)
    return found


@torch.no_grad()
def place_tensors(model: nn.Module, places: Mapping[str, torch.device], rest: torch.device) -> None:
    """Move each parameter and buffer to its place; one with several names to that of the first.

    Args:
        model: whose tensors they are.
        places: by name of a parameter or buffer.
        rest: the place of all other tensors.
    """
    recurrent = []
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            recurrent.append(module)
            module._flat_weight_refs = []  # as ``Module.to`` does
    for name, tensor in list(tensors_of(model)):
        place = places.get(name, rest)
        if tensor.device != place:
            place_tensor(tensor, place)
    for module in recurrent:
        module._init_flat_weights()  # cuDNN wants its weights in one piece


def _arriving(
    stage: int,
    place: torch.device | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Act before the forward of a module on a stage.

    Args:
        stage: of the module.
        place: where its inputs must be; None where all stages are on one device.
        module: that is called.
        args: its inputs.
        kwargs: its inputs by name.

    Returns:
        The inputs there, or None for those that are given.
    """
    microbatch = current()
    if microbatch is None:
        if place is None:
            return None
        return _moved(place, args, kwargs)
    # A checkpoint that computes again over several accelerators does so in the one turn that it
    # has.
    if place is not None and microbatch.kind == "B":
        return _moved(place, args, kwargs)
    before = microbatch.stage
    if before is None:
        before = stage
    elif before == stage and microbatch.outer is not None:
        return None

    sent = None
    queues = microbatch.queues
    if queues is not None and place is not None and before != stage:
        with queues.sending(before, microbatch.come_back):
            sent = _moved(place, args, kwargs)
    microbatch.enter(stage)
    if microbatch.kind == "F":  # else it is computed again, by a checkpoint
        microbatch.mark((args, kwargs))
        if microbatch.outer is None:
            microbatch.outer = module
    if place is not None and sent is None:
        sent = _moved(place, args, kwargs)
    return sent


def _moved(place: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a layer's inputs at a place."""
    # There is no mode where a layer is called by itself.
    mode = transfer.current() or TransferMode([place])
    mode.place = place
    return mode.nest_moved((args, kwargs))


def _leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Act after a module's forward, on whose stage all was that is in it."""
    microbatch = current()
    if microbatch is not None and microbatch.outer is module:
        microbatch.outer = None
        microbatch.mark(output)


def _entering(places: list[torch.device], module: nn.Module, args: tuple[Any, ...]) -> None:
    """Act before the forward of a whole model outside of a step: what meets in it is moved, too."""
    if transfer.current() is None:
        TransferMode(places, owner=module).__enter__()


def _exiting(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Act after the forward of a whole model, however it ended."""
    mode = transfer.current()
    if mode is not None and mode.owner is module:
        mode.__exit__(None, None, None)
