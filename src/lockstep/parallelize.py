"""``parallelize``: a strategy for a person's own loop."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from lockstep.errors import InputError, StrategyError, counted
from lockstep.launch import devices as _devices
from lockstep.launch import here
from lockstep.launch.devices import Devices
from lockstep.launch.hang_report import Watch
from lockstep.launch.world import World
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat, Line
from lockstep.signatures import UpdateFields, with_fields_of
from lockstep.strategies import Strategy, choose, named
from lockstep.strategies.steps.step import Step
from lockstep.tensors.allocator import keep_freed_memory


@with_fields_of(Recipe)
def parallelize(
    model: nn.Module | dict[str, nn.Module],
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer
    | Callable[..., torch.optim.Optimizer]
    | Mapping[str, Callable[..., torch.optim.Optimizer]],
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    **settings: Unpack[UpdateFields],
) -> Step:
    """Make a Step of a model, for a loop of your own::

        step = lockstep.parallelize(model, loss, optimizer, strategy="dp", devices=2)
        for inputs, targets in lockstep.batches(dataset, batch_size=256):
            print(step(inputs, targets).loss)

    ``step.backward(inputs, targets)``, as often as you like, and then ``step.update()`` do the same
    in parts.

    Where results will differ from those of one device, Python's ``warnings`` report it.

    Inside ``lockstep.launch`` or torchrun each rank calls this with the same model (by ``ddp``);
    elsewhere one process drives all devices (by ``dp`` or ``single``).

    Args:
        model: the model itself; it is trained in place, and moved to the first device. One in
            evaluation mode is put in training mode, with a warning; ``model.eval()`` afterwards
            stays.
        loss: as in a Job; None where ``step=`` is among the settings.
        optimizer: over the model's parameters, or a function that makes one from ``(name,
            parameter)`` pairs; with ``step=`` a dict of such functions.
        strategy: by name; None takes ``ddp`` where there are several ranks, ``dp`` on several
            devices, else ``single``.
        devices: those of this process, where it isn't a rank of a launch. (The replicas of
            ``ddp=2xpp=2`` are ranks of ``lockstep.launch(..., devices=4, devices_per_rank=2)``, or
            of torchrun.)
        settings: those of a Job that an update needs: ``step``, ``accumulate``, ``clip_norm``,
            ``sync_batchnorm``, ``precision``, ...

    Raises:
        InputError: the strategy can't be used here, or a setting is wrong.
    """
    strategy = named(strategy) if isinstance(strategy, str) else strategy
    world = here(devices, 1 if strategy is None else strategy.devices_per_rank)
    if world is None:
        world = World(devices=_devices.parse(devices))
    if isinstance(model, dict):
        model = nn.ModuleDict(model)
    made = optimizer
    recipe = Recipe(
        model=lambda: model,
        loss=loss,
        optimizer=(lambda named: made) if isinstance(made, torch.optim.Optimizer) else made,
        **settings,
    )
    _refuse_shards(model)
    if recipe.keep_memory:
        keep_freed_memory()  # the loop is the person's: nobody can say when it ends
    if strategy is None:
        strategy = "ddp" if world.size > 1 else "dp" if len(world.devices) > 1 else "single"
    chosen = choose(strategy, world.devices)
    _refuse_other_devices(chosen, world)
    was_in_evaluation = not model.training
    step = chosen.prepare(recipe, world)
    step.own_loop = True
    world.in_step = world.in_step or step.together
    if world.size > 1 and not world.is_watched:
        Watch(world, always=False).__enter__()  # for as long as the process lives
    step.caveats = functools.partial(chosen.caveats, recipe, model, step.replicas)

    def caveats_in_parts() -> list[Caveat]:
        cut = recipe.replace(accumulate=max(2, recipe.accumulate))
        return chosen.caveats(cut, model, step.replicas)

    step.caveats_in_parts = caveats_in_parts
    if world.is_first:
        if not isinstance(world.emit, _Warns):
            world.emit = _Warns(world.emit)
        step.log_once((*step.caveats(), *step.of_own_loop))
        if was_in_evaluation:
            step.log_once([_PUT_IN_TRAINING])
    return step


def _refuse_shards(model: nn.Module) -> None:
    """Refuse a model that a step of ``fsdp``, or ``fully_shard``, has in shards already."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise InputError(
                f'"{name}" of the model is a shard (DTensor) already, of another step or of your '
                "own: give each step of fsdp a model of its own, or take ddp"
            )


def _refuse_other_devices(strategy: Strategy, world: World) -> None:
    """Refuse another number of devices of this rank than the strategy needs, or unknown speeds."""
    if getattr(strategy, "shares", None) == "auto":
        raise StrategyError(
            f"{strategy.name}: shares auto is for jobs, whose data are known in advance: give "
            "numbers, as 2,1"
        )
    each = strategy.devices_per_rank
    if world.size > 1 and len(world.devices) != each:
        raise StrategyError(
            f"{strategy.name} needs {counted(each, 'device')} for each rank, and this rank has "
            f"{len(world.devices)}: lockstep.launch(..., devices_per_rank={each}); under "
            "torchrun call parallelize before lockstep.batches"
        )


_PUT_IN_TRAINING = (
    "the model was in evaluation mode, and is in training mode now: call model.train() before, "
    "or, if it is to be "
    "trained in evaluation mode, model.eval() after lockstep.parallelize"
)


class _Warns:
    """Passes a step's notes to Python's warnings, since a person's own loop has no display."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit

    def __call__(self, event: Any) -> None:
        if isinstance(event, Line) and event.kind == "note":
            warnings.warn(event.text, stacklevel=2)
        self._emit(event)
