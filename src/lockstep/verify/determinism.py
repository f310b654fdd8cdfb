"""Determinism: dropout, all random numbers, or batch norms are taken out of a model.

Both sides get the same. Dropout is out from the start, since its masks would differ; of the others
an experiment shows whether they are the cause. In the place of random numbers each operator gives
one number, so that parts of a batch draw what the whole drew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.job import Job
from lockstep.model.build import as_module
from lockstep.tensors.seeding import kept_state_on

Thing = Literal["dropout", "draws", "norms"]


def without_draws(job: Job, things: frozenset[Thing]) -> Job:
    """Return the job with dropout, or all random numbers, out of its model and step function."""
    if not things - {"norms"}:
        return job
    step = job.step and functools.partial(_still, job.step, things)
    model = functools.partial(_built, job.model, things)
    job = job.replace(model=model, step=step)
    if "draws" in things:
        # Accelerators compute activations again in threads where draws aren't held.
        job = job.replace(activation_checkpointing=None)
    return job


def _built(build: Callable[[], nn.Module], things: frozenset[Thing]) -> nn.Module:
    """Build a model without dropout, or without any draws in its forward."""
    model: nn.Module = as_module(build())
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):  # attention, recurrent layers
            module.dropout = 0.0  # type: ignore[assignment]
    model.forward = functools.partial(_still, model.forward, things)
    return model


def _still(
    function: Callable[..., Any], things: frozenset[Thing], *args: Any, **kwargs: Any
) -> Any:
    with still(things):
        return function(*args, **kwargs)


@contextmanager
def still(things: frozenset[Thing]) -> Iterator[None]:
    """Draw nothing in this thread meanwhile, or no masks of dropout, where that is taken out."""
    if not things - {"norms"}:
        yield
        return
    with _NoDropoutInAttention(), _Still(_DRAWS if "draws" in things else _MASKS):
        yield


def hold_norms(model: nn.Module) -> None:
    """Let batch norms take their running statistics, not those of a batch."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.training = False


_MOST = 1000
"""Draws that are replaced, at most: a function may draw until it likes what it got."""


class _NoDropoutInAttention(TorchFunctionMode):
    """Attention on accelerators draws its dropout inside one kernel, so it gets none to draw."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and "dropout_p" in named:
            named["dropout_p"] = 0.0
        return func(*args, **named)


_DRAWS = ("rand", "normal", "uniform", "exponential", "geometric", "bernoulli", "native_dropout")
"""What the names of operators that draw, and whose draws can be replaced, begin with."""

_MASKS = ("bernoulli_", "native_dropout")
"""The same of those that draw the masks of dropout."""


class _Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that draw from PyTorch's own generators give the same number everywhere.

    Where something is drawn with a chance, that is the chance, so that dropout passes on what it
    gets, up to its scale. The generators are put back, so that numbers drawn in another way still
    show.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        named = dict(kwargs or {})
        operator = func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags and operator != "randperm"
        if not draws or not operator.startswith(self._names) or self._calls >= _MOST:
            return func(*args, **named)
        self._calls += 1
        given = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        device = named.get("device") or given or torch.device("cpu")
        with kept_state_on(device):
            made = func(*args, **named)
        return _instead(operator, made, args)


def _instead(operator: str, made: Any, args: tuple[Any, ...]) -> Any:
    """Return what is given in the place of what an operator made of its arguments."""
    if operator == "native_dropout":
        return _kept(made, *args)
    if operator.startswith("bernoulli"):
        chance = 0.5 if operator == "bernoulli_" else args[0]
        if len(args) > 1:
            chance = args[1]
        return made.copy_(torch.as_tensor(chance, dtype=made.dtype))
    bounds = [arg for arg in args if isinstance(arg, int | float)]
    if operator == "uniform_" and len(bounds) == 2:
        return made.fill_(sum(bounds) / 2)
    if operator.startswith(("rand_", "uniform")) or operator == "rand":
        return made.fill_(0.5)
    if operator.startswith(("exponential", "geometric")):
        return made.fill_(1)
    # The lowest integer that may be drawn is an argument where there are two bounds.
    is_whole = not operator.startswith(("randn", "normal"))
    return made.fill_(bounds[0] if is_whole and len(bounds) > 1 else 0)


def _kept(made: Any, inputs: Tensor, p: float, *args: Any) -> Any:
    """Keep everything in an accelerator's dropout; its backward scales by the mask."""
    if p == 1:
        return made
    mask = made[1].fill_(True)
    return inputs / (1 - p), mask
