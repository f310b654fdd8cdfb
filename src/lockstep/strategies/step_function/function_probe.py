"""Whether a step function computes sums over samples, so that the parts of a batch add up to the whole.

In steps 1, 2, 4, 8, ... the function is run on a local batch and on two parts of it, with an ``update`` that only takes
note of what it is given: nothing is moved. Each run has a copy of the model, since a function may write to it (a target
network, a running mean). Layers are in eval mode meanwhile, since dropout and batch norm are told of anyway.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.errors import LossError, StrategyError
from lockstep.launch.events import Caveat
from lockstep.launch.world import World
from lockstep.model.additivity import is_apart
from lockstep.model.inspection import detached_attributes
from lockstep.model.loss import Loss, Number
from lockstep.model.torch_losses import HALF
from lockstep.tensors.pytree import cut
from lockstep.tensors.seeding import kept_states, same, states

_TOLERANCE = 1e-4
"""Of float32; a mean of means is off by some per cent."""


class _Noted:
    """Stands for ``update``."""

    def __init__(self, world: World, samples: int) -> None:
        self.step, self.samples = world.step, samples
        self.calls: list[tuple[str, float, float]] = []

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        loss = as_sum(name, total, count)
        self.calls.append((name, float(loss.total.detach()), float(loss.count)))


def as_sum(name: str, total: Any, count: Any) -> Loss:
    """What ``update`` was given, as total and count.

    Raises:
        LossError: the total is no scalar tensor, or the count no number, or missing: what a mean is over is unknown.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        what = f"of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise LossError(f'update("{name}"): the loss is {what}, a scalar tensor is expected')
    total = total.float() if total.dtype in HALF else total
    if count is None:
        raise LossError(
            f'update("{name}"): there is no count, so what a mean is over is unknown: give the sum over items, and '
            f'their number: update("{name}", total, count)'
        )
    if not isinstance(count, int | float) and not _is_scalar(count):
        raise LossError(f'update("{name}"): the count is {count!r}, a number of items is expected')
    return Loss(total, count)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and not value.requires_grad


def probe(function: Callable[..., None], model: nn.Module, part: Part, world: World, *, shared: bool) -> list[Caveat]:
    """What a person has to know of a function, by what it makes of a local batch that is on the model's device.

    Raises:
        StrategyError: a loss is no sum over samples, or parameters are written that several replicas have (``shared``).
    """
    if part.size < 2:
        return []
    accelerators = () if world.device.is_slot else (world.device.torch,)
    modes = [(module, module.training) for module in model.modules()]
    half = (part.size + 1) // 2
    with kept_states(accelerators):
        model.eval()
        try:
            before = states(accelerators)
            whole, written = _calls(function, model, part, world, 0, part.size)
            if shared and (names := [name for name, _ in model.named_parameters() if name in written]):
                raise StrategyError(
                    f'dp: the step function writes parameter "{names[0]}", which all replicas share, so each of them '
                    "would write it",
                    kind="state",
                    fix="take ddp, or write it in a callback's on_step",
                )
            if not same(before, states(accelerators)):
                return [
                    Caveat(
                        "drawing",
                        "the step function draws random numbers: other ones for each local batch than single-device "
                        "training; they are reproducible",
                        "let the dataset draw them: a sample's are the same on any number of devices",
                    )
                ]
            parts, wrote = zip(
                *(_calls(function, model, part, world, *of) for of in ((0, half), (half, part.size - half))),
                strict=True,
            )
        finally:
            for module, mode in modes:
                module.training = mode
    if any([name for name, *_ in calls] != [name for name, *_ in whole] for calls in parts):
        return []  # replicas that make different calls are found in the step itself
    for (name, *numbers), *others in zip(whole, *parts, strict=True):
        for value, one, other in zip(numbers, *(of[1:] for of in others), strict=True):
            if is_apart(value, one, other, tolerance=_TOLERANCE):
                raise StrategyError(
                    f'update("{name}"): the loss of {part.size} samples is {value:.4g}, and of two parts of them '
                    f"{one:.4g} and {other:.4g}, so it isn't a sum over samples",
                    kind="mixing",
                    fix=f'give the sum and the number of items, update("{name}", total, count); or use single',
                )
    return [
        Caveat(
            "state",
            f'the step function writes "{name}" by the samples of its local batch, so it is another one on each device',
            "make it of what is the same on all of them",
        )
        for name, value in written.items()
        if any(name in of and not torch.equal(value, of[name]) for of in wrote)
    ]


def _calls(
    function: Callable[..., None], model: nn.Module, part: Part, world: World, start: int, size: int
) -> tuple[list[tuple[str, float, float]], dict[str, torch.Tensor]]:
    """The calls of ``update``, and the parameters and buffers that the function wrote."""
    with contextlib.suppress(Exception):  # one that can't be copied is given itself
        model = copy.deepcopy(model, detached_attributes(model))
    noted = _Noted(world, part.of)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    versions = {name: tensor._version for name, tensor in state.items()}
    function(model, cut((part.inputs, part.targets), start, size, part.size), noted)
    return noted.calls, {name: tensor for name, tensor in state.items() if tensor._version != versions[name]}
