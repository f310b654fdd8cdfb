"""Whether a step function computes sums over samples, so that the parts of a batch add up to the
whole.

In steps 1, 2, 4, 8, ... the function is run on a local batch, on two parts of it, on it with
samples of another one (a mask may be even over each local batch, and not over both), and on it
several times (the hardest ten samples of a batch may be all of a local batch), with an ``update``
that only takes note of what it is given: nothing is moved. Each run has a copy of the model, since
a function may write to it (a target network, a running mean). Dropout and batch norms are in
evaluation mode meanwhile, since they are told of anyway.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.errors import LossError, StrategyError, told
from lockstep.launch.events import Caveat
from lockstep.launch.world import World
from lockstep.model.inspection import (
    NotedDraws,
    OutsideVariables,
    Seen,
    attribute_prints,
    detached_attributes,
    drawing_nothing,
    is_ragged,
    without_noise,
)
from lockstep.model.inspection.rounding import first_apart
from lockstep.model.losses.additivity import Nest, is_apart, repeated, tolerance_of
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.losses.torch_losses import HALF
from lockstep.model.modes import in_evaluation_mode
from lockstep.tensors.digest import digest
from lockstep.tensors.rows import cut, joined
from lockstep.tensors.seeding import kept_states, same, states

_LARGEST = 2**30
"""Bytes of parameters up to which gradients are looked at, in the first step."""


class _Noted:
    """Stands for ``update``."""

    def __init__(self, step: int, samples: int, model: nn.Module | None) -> None:
        self.step, self.samples, self._model = step, samples, model
        self.calls: list[tuple[str, float, float]] = []
        self.totals: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def __call__(self, name: str, total: torch.Tensor, count: Number | None = None) -> None:
        loss = as_sum(name, total, count)
        self.calls.append((name, float(loss.total.detach()), float(loss.count)))
        self.totals.append(loss.total.detach())
        if self._model is None or not loss.total.requires_grad:
            return
        trained = {
            f"{name}.{n}": p
            for n, p in self._model.get_submodule(name).named_parameters()
            if p.requires_grad
        }
        found: tuple[torch.Tensor | None, ...] = ()
        if trained:  # else all of it is frozen
            found = torch.autograd.grad(
                loss.total, list(trained.values()), retain_graph=True, allow_unused=True
            )
        zero = torch.zeros(())
        named = zip(trained, found, strict=True)
        self.gradients.append(
            {n: g if g is not None and g.layout == torch.strided else zero for n, g in named}
        )


def as_sum(name: str, total: Any, count: Any) -> Loss:
    """What ``update`` was given, as total and count.

    Raises:
        LossError: the total is no scalar tensor, or the count no number, or missing: what a mean is
            over is unknown.
    """
    if not isinstance(total, torch.Tensor) or total.dim():
        what = (
            f"of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else f"a {type(total).__name__}"
        )
        raise LossError(f'update("{name}"): the loss is {what}, a scalar tensor is expected')
    total = total.float() if total.dtype in HALF else total
    if count is None:
        raise LossError(
            f'update("{name}"): there is no count, so what a mean is over is unknown: give the '
            "sum over items, and "
            f'their number: update("{name}", total, count)'
        )
    if not isinstance(count, int | float) and not _is_scalar(count):
        raise LossError(f'update("{name}"): the count is {count!r}, a number of items is expected')
    return Loss(total, count)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and not value.requires_grad


def probe(
    function: Callable[..., None],
    model: nn.Module,
    shares: list[Part],
    world: World,
    step: int,
    *,
    local_batches: int,
) -> list[Caveat]:
    """What a person has to know of a function, by what it makes of a local batch that is on the
    model's device.

    Args:
        function: it.
        model: whose copies it is given.
        shares: the local batch, and samples of another one, if there is one.
        world: who asks.
        step: the number of the update.
        local_batches: of a global batch; it is given the local batch as often.

    Raises:
        StrategyError: a loss is no sum over samples.
    """
    part = shares[0]
    accelerators = () if world.device.is_slot else (world.device.torch,)
    nest = part.inputs, part.targets
    found: list[Caveat] = []
    outside = OutsideVariables([function])

    calls: Callable[[Nest], Called] = functools.partial(_calls, function, model, step, part.of)
    with kept_states(accelerators), outside.kept(), NotedDraws(keeps=True) as noted:
        before = states(accelerators)
        with outside.kept():
            with outside.watched() as changes:
                whole = calls(nest)
            found += map(_changed, changes.left)
            puts_back = changes.put_back
            if changes.left:  # an object is another one once it has what its class had
                with outside.watched() as changes:
                    calls(nest)
                puts_back = puts_back or changes.put_back
        if world.data.local_batches > 1:
            Seen(puts_back=puts_back).refuse_what_is_put_back()
        calls = outside.kept()(calls)  # else a number of calls might come to where it acts
        if not same(before, drawn := states(accelerators)) or noted.drew:
            found.append(_DRAWING)
            # All else is seen while it draws nothing.
            calls = drawing_nothing()(calls)
            try:
                whole = calls(nest)
            except Exception:  # which it can't take
                return found
            if not same(drawn, states(accelerators)):
                return found
        if is_ragged(part.inputs, part.size):
            return [
                *found,
                _unchecked(
                    "inputs have several rows for a sample, as the nodes of graphs, or none"
                ),
            ]
        parts = []
        if part.size > 1:
            half = (part.size + 1) // 2
            try:
                parts = [
                    calls(cut(nest, *of, part.size)) for of in ((0, half), (half, part.size - half))
                ]
            except _CANT_TAKE as error:
                return [*found, _unchecked(told(error))]
            _refuse_no_sums(part.size, whole, *parts)
            found += _gradients_apart(whole, *parts)
        for other in (one for one in shares[1:] if one.size):
            theirs = other.inputs, other.targets
            both = joined(nest, part.size, theirs, other.size)
            with contextlib.suppress(*_CANT_TAKE):
                if both is not None:
                    _refuse_no_sums(part.size + other.size, calls(both), whole, calls(theirs))
        many = repeated(nest, part.size, local_batches)
        with contextlib.suppress(*_CANT_TAKE):
            if many is not None:
                _refuse_no_sums(
                    local_batches * part.size, calls(many), whole, whole.times(local_batches - 1)
                )
    return found + [
        Caveat(
            "state",
            f'the step function writes "{name}" by the samples of its local batch, so it is '
            "another one on each device",
            "make it of what is the same on all of them",
        )
        for name in (*whole.written, *whole.attributes)
        if any(_differ(name, whole, of) for of in parts)
    ]


def _differ(name: str, whole: Called, part: Called) -> bool:
    """Whether what was written under that name depends on the samples."""
    if name in whole.attributes:
        return part.attributes.get(name) != whole.attributes[name]
    return name in part.written and not torch.equal(whole.written[name], part.written[name])


_DRAWING = Caveat(
    "drawing",
    "the step function draws random numbers: other ones for each local batch than single-device "
    "training; they are "
    "reproducible",
    "let the dataset draw them: a sample's are the same on any number of devices",
)


def _unchecked(why: str) -> Caveat:
    text = (
        "whether the losses are sums over samples isn't checked, since a local batch can't be "
        f"cut ({why})"
    )
    return Caveat("mixing", text, "lockstep verify shows it")


_CANT_TAKE = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What a function may raise that takes so many samples only."""


@dataclass(frozen=True)
class Called:
    """What a function has made of some samples.

    Attributes:
        updates: name, total and count of each call of ``update``.
        written: the parameters and buffers that it wrote.
        attributes: hashes of the attributes of modules that it wrote.
        gradients: of each call's total, in the first step, by the names of parameters.
        tolerance: how far, relative to them, totals of parts may be from that of the whole.
    """

    updates: list[tuple[str, float, float]]
    written: dict[str, torch.Tensor]
    attributes: dict[str, bytes] = field(default_factory=dict)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    tolerance: float = 1.0

    def times(self, number: int) -> Called:
        """What sums over samples are for the same ones so many times."""
        return Called(
            [(name, number * total, number * count) for name, total, count in self.updates], {}
        )


def _refuse_no_sums(samples: int, whole: Called, *parts: Called) -> None:
    """Raise where the losses of so many samples aren't the sums of those of two parts of them.

    Raises:
        StrategyError: one isn't.
    """
    if any(
        [name for name, *_ in of.updates] != [name for name, *_ in whole.updates] for of in parts
    ):
        return  # replicas that make different calls are found in the step itself
    for (name, *numbers), *others in zip(whole.updates, *(of.updates for of in parts), strict=True):
        for value, one, other in zip(numbers, *(of[1:] for of in others), strict=True):
            if is_apart(value, one, other, tolerance=whole.tolerance):
                raise StrategyError(
                    f'update("{name}"): the loss of {samples} samples is {value:.4g}, and of two '
                    "parts of them "
                    f"{one:.4g} and {other:.4g}, so it isn't a sum over samples",
                    kind="mixing",
                    fix=f'give the sum and the number of items, update("{name}", total, count); '
                    "or use single",
                )


def _calls(
    function: Callable[..., None], model: nn.Module, step: int, samples: int, nest: Nest
) -> Called:
    """What the function makes of some samples, with a copy of the model; ``samples``: of the
    global batch.
    """
    mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        model = copy.deepcopy(model, detached_attributes(model))
        without_noise(model)
    except Exception:  # one that can't be copied is given itself
        mode = in_evaluation_mode(model)
    looks = step <= 1 and sum(p.nbytes for p in model.parameters()) <= _LARGEST
    noted = _Noted(step, samples, model if looks else None)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before, attributes = (
        {name: digest(tensor) for name, tensor in state.items()},
        attribute_prints(model),
    )
    with mode:
        function(model, nest, noted)
    now = {
        name: its for name, its in attribute_prints(model).items() if attributes.get(name) != its
    }
    written = {name: tensor for name, tensor in state.items() if digest(tensor) != before[name]}
    return Called(
        noted.calls, written, now, noted.gradients, tolerance_of(nest, noted.totals, waits=False)
    )


def _changed(name: str) -> Caveat:
    text = (
        f'the step function changes "{name}", which is outside of the models: once for each local '
        "batch, not once a "
        "step, and all replicas of dp share it"
    )
    return Caveat("state", text, "choose by update.step, or single keeps the results")


def _gradients_apart(whole: Called, *parts: Called) -> Iterator[Caveat]:
    """Say what gradient isn't the sum of those of two parts, though the loss is: ``loss /
    loss.detach()``.
    """
    if not all(
        [list(g) for g in of.gradients] == [list(g) for g in whole.gradients] for of in parts
    ):
        return
    for of, one, other in zip(whole.gradients, *(of.gradients for of in parts), strict=True):
        sums = [a + b for a, b in zip(one.values(), other.values(), strict=True)]
        if (name := first_apart(list(of), list(of.values()), sums)) is not None:
            text = (
                f'the gradient of "{name}" is not the sum of those of parts of the batch, '
                "though the loss is"
            )
            yield Caveat("autograd function", text, "single keeps the results")
