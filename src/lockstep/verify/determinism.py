"""Determinism: dropout, all random numbers, or batch norms are taken out of a model.

Both sides get the same. Dropout is out from the start, since its masks would differ; of the others
an experiment shows whether they are the cause. In the place of random numbers each operator gives
about their mean, so that parts of a batch draw what the whole drew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    # Accelerators compute activations again in threads where draws aren't held.
    return job.replace(activation_checkpointing=None) if "draws" in things else job


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


def still(things: frozenset[Thing]) -> AbstractContextManager[None]:
    """Draw nothing in this thread meanwhile, or no masks of dropout, where that is taken out."""
    if not things - {"norms"}:
        return nullcontext()
    return drawing_nothing(only_masks="draws" not in things)


def hold_norms(model: nn.Module) -> None:
    """Let batch norms take their running statistics, not those of a batch."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.training = False


_MOST = 1000
"""Draws that are replaced, at most: a function may draw until it likes what it got."""


@contextmanager
def drawing_nothing(*, only_masks: bool = False) -> Iterator[None]:
    """Draw nothing in this thread meanwhile; with ``only_masks``, no masks of dropout."""
    with _NoDropoutInAttention(), _Means(_MASKS if only_masks else _INSTEAD):
        yield


class _NoDropoutInAttention(TorchFunctionMode):
    """Attention on accelerators draws its dropout inside one kernel, so it gets none to draw."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and "dropout_p" in named:
            named["dropout_p"] = 0.0
        return func(*args, **named)


class _Means(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that draw from PyTorch's own generators give about their mean.

    So dropout passes on what it gets, up to its scale. The generators are put back, so that numbers
    drawn in another way still show.
    """

    def __init__(self, instead: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instead = instead
        self._calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        instead = self._instead.get(func.overloadpacket.__name__)
        if instead is None or self._calls >= _MOST:
            return func(*args, **named)
        self._calls += 1
        given = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
        device = named.get("device") or given or torch.device("cpu")
        with kept_state_on(device):
            made = func(*args, **named)
        return instead(made, *args)


def _filled(value: float) -> Callable[..., Tensor]:
    return lambda made, *args: made.fill_(value)


def _chance(made: Tensor, itself: Tensor, chance: Any = 0.5) -> Tensor:
    return made.copy_(torch.as_tensor(chance, dtype=made.dtype))


def _chances(made: Tensor, chances: Tensor, chance: Any = None) -> Tensor:
    return _chance(made, made, chances if chance is None else chance)


def _middle(made: Tensor, itself: Tensor, lower: float = 0.0, upper: float = 1.0) -> Tensor:
    return made.fill_((lower + upper) / 2)


def _lowest(made: Tensor, *args: Any) -> Tensor:
    """Give the lowest integer that may be drawn; it is an argument where there are two bounds."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    lowest = bounds[0] if len(bounds) > 1 else 0
    return made.fill_(lowest)


def _kept(made: Any, inputs: Tensor, p: float, *args: Any) -> Any:
    """Keep everything in an accelerator's dropout; its backward scales by the mask."""
    if p == 1:
        return made
    mask = made[1].fill_(True)
    return inputs / (1 - p), mask


_INSTEAD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), _filled(0.5)),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), _filled(0)),
    **dict.fromkeys(("exponential_", "geometric_"), _filled(1)),
    **dict.fromkeys(("randint", "randint_like", "random_"), _lowest),
    "bernoulli": _chances,
    "bernoulli_": _chance,
    "uniform_": _middle,
    "native_dropout": _kept,
}
"""By operator, what is given in the place of what it drew: a function of that, and of the
operator's arguments.
"""

_MASKS = {name: _INSTEAD[name] for name in ("bernoulli_", "native_dropout")}
"""The operators that draw the masks of dropout."""
