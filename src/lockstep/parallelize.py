"""``parallelize``: a strategy for a person's own loop."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError, StrategyError, counted
from lockstep.job import Job
from lockstep.launch import devices as _devices
from lockstep.launch import here
from lockstep.launch.devices import Devices
from lockstep.launch.events import Caveat, Line
from lockstep.launch.hang_report import Watch, is_watched
from lockstep.launch.world import World
from lockstep.strategies import Strategy, choose, named
from lockstep.strategies.steps.step import Step
from lockstep.tensors.allocator import keep_freed_memory


def parallelize(
    model: nn.Module | dict[str, nn.Module],
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer
    | Callable[..., torch.optim.Optimizer]
    | Mapping[str, Callable[..., torch.optim.Optimizer]],
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    **settings: Any,
) -> Step:
    """Make a Step of a model, for a loop of your own::

        step = lockstep.parallelize(model, loss, optimizer, strategy="dp", devices=2)
        for inputs, targets in lockstep.batches(dataset, batch_size=256):
            print(step(inputs, targets).loss)

    ``step.backward(inputs, targets)``, as often as you like, and then ``step.update()`` do the same
    in parts.

    Where its numbers will not be those of one device, that is said by Python's ``warnings``.

    Inside ``lockstep.launch`` or torchrun each rank calls this with the same model (by ``ddp``);
    elsewhere one process drives all devices (by ``dp`` or ``single``).

    Args:
        model: the model itself; it is trained in place, and moved to the first device. One in
            evaluation mode is put in training mode, which is said; ``model.eval()`` afterwards
            stays.
        loss: as in a Job; None where ``step=`` is among the settings.
        optimizer: over the model's parameters, or a function that makes one from ``(name,
            parameter)`` pairs; with ``step=`` a dict of such functions.
        strategy: by name; None takes ``ddp`` where there are several ranks, ``dp`` on several
            devices, else ``single``.
        devices: those of this process, where it isn't a rank of a launch. (The replicas of
            ``ddp=2xpp=2`` are ranks of ``lockstep.launch(..., devices=4, devices_per_rank=2)``, or
            of torchrun.)
        settings: as the Job's: ``step``, ``accumulate``, ``clip_norm``, ``sync_batchnorm``,
            ``precision``, ...

    Raises:
        InputError: the strategy can't be used here, or a setting is wrong.
    """
    strategy = named(strategy) if isinstance(strategy, str) else strategy
    world = here(devices, 1 if strategy is None else strategy.devices_per_rank)
    if world is None:
        world = World(devices=_devices.parse(devices))
    if strategy is None:
        strategy = "ddp" if world.size > 1 else "dp" if len(world.devices) > 1 else "single"
    model = nn.ModuleDict(model) if isinstance(model, dict) else model
    # The data are the person's own; a Job wants to be told of some.
    job = Job(
        model=lambda: model,
        loss=loss,  # type: ignore[arg-type]
        optimizer=(lambda named: optimizer)
        if isinstance(optimizer, torch.optim.Optimizer)
        else optimizer,
        train_data=(),
        batch_size=2**31,
        **settings,
    )
    if (
        shard := next(
            (name for name, p in model.named_parameters() if hasattr(p, "placements")), None
        )
    ) is not None:
        raise InputError(
            f'"{shard}" of the model is a shard (DTensor) already, of another step or of your '
            "own: give each step of "
            "fsdp a model of its own, or take ddp"
        )
    if job.keep_memory:
        keep_freed_memory()  # the loop is the person's: nobody can say when it ends
    chosen = choose(strategy, world.devices)
    if world.size > 1 and len(world.devices) != (each := chosen.devices_per_rank):
        raise StrategyError(
            f"{chosen.name} wants {counted(each, 'device')} for each rank, and this one has "
            f"{len(world.devices)}: "
            f"lockstep.launch(..., devices_per_rank={each}); under torchrun call parallelize "
            "before lockstep.batches"
        )
    evaluates = not model.training
    step = chosen.prepare(job, world)
    step.own_loop = True
    world.in_step = world.in_step or step.together
    if world.size > 1 and not is_watched():
        Watch(world, always=False).__enter__()  # for as long as the process lives
    if world.is_first and not isinstance(world.tell, _Warns):
        world.tell = _Warns(world.tell)
    step.caveats = functools.partial(chosen.caveats, job, model, step.replicas)
    step.caveats_in_parts = functools.partial(_in_parts, chosen, job, model, step.replicas)
    if world.is_first:
        step.tell_once((*step.caveats(), *step.of_own_loop))
        step.tell_once([_PUT_IN_TRAINING] if evaluates else [])
    return step


_PUT_IN_TRAINING = (
    "the model was in evaluation mode, and is in training mode now: call model.train() before, "
    "or, if it is to be "
    "trained in evaluation mode, model.eval() after lockstep.parallelize"
)


def _in_parts(
    strategy: Strategy, job: Job, model: nn.Module, replicas: int, microbatches: int | None = None
) -> list[Caveat]:
    """The caveats of batches that are cut in so many micro-batches; None: that are given to
    ``step.backward``.
    """
    every = strategy.caveats(
        job.replace(accumulate=microbatches or max(2, job.accumulate)), model, replicas
    )
    if microbatches is not None:
        return every
    text = "BatchNorm normalizes over each part of a batch that step.backward(...) is given"
    return [
        replace(one, text=text) if one.kind == "batchnorm" and not one.fix else one for one in every
    ]


class _Warns:
    """Gives what a step has to say to Python's warnings, since a person's own loop has no
    display.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell

    def __call__(self, event: Any) -> None:
        if isinstance(event, Line) and event.kind == "note":
            warnings.warn(event.text, stacklevel=_frames_of_libraries())
        self._tell(event)


def _frames_of_libraries() -> int:
    """How many frames up from the caller the person's own code is, as ``warnings`` counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "lockstep",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level
