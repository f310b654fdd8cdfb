"""Still: a model with what it draws, or its batch norms, taken out of the question, for an experiment.

Both sides get the same. Where they are then equal, what was taken out is the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tensors.seeding import kept_state_on

Thing = Literal["draws", "norms"]


def hold_still(model: nn.Module, things: frozenset[Thing]) -> None:
    """Take things out of a model, in place: random numbers, or the statistics of a batch in its batch norms."""
    if "norms" in things:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                module.training = False
    if "draws" in things:
        for module in model.modules():
            if isinstance(getattr(module, "dropout", None), float):  # attention, recurrent layers
                module.dropout = 0.0  # type: ignore[assignment]
        model.forward = functools.partial(_drawing_nothing, model.forward)


def still_function(function: Callable[..., Any], things: frozenset[Thing]) -> Callable[..., Any]:
    """The step function of a job, which draws nothing where that is to be taken out."""
    return functools.partial(_drawing_nothing, function) if "draws" in things else function


def _drawing_nothing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with drawing_nothing():
        return function(*args, **kwargs)


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Meanwhile this thread draws nothing."""
    with _NoDropoutInAttention(), _Means():  # type: ignore[no-untyped-call]
        yield


class _NoDropoutInAttention(TorchFunctionMode):
    """On accelerators attention draws its dropout within one kernel, where nothing can be put in its place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


class _Means(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch's operators draw from its own generators is the same for every sample: about its mean.

    So dropout passes on what it gets, up to its scale. The generators stand afterwards where they did, so that what is
    drawn in another way still shows.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        instead = _INSTEAD.get(func.overloadpacket.__name__)
        if instead is None:
            return func(*args, **kwargs)
        given = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
        with kept_state_on(kwargs.get("device") or given or torch.device("cpu")):
            made = func(*args, **kwargs)
        return instead(made, *args)


def _filled(value: float) -> Callable[..., torch.Tensor]:
    return lambda made, *args: made.fill_(value)


def _chance(made: torch.Tensor, chance: Any) -> torch.Tensor:
    return made.copy_(torch.as_tensor(chance, dtype=made.dtype))


def _lowest(made: torch.Tensor, *args: Any) -> torch.Tensor:
    """``randint`` and its like: the lowest that may come, which is given where there are two bounds."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    return made.fill_(bounds[0] if len(bounds) > 1 else 0)


def _likeliest(made: torch.Tensor, weights: torch.Tensor, count: int, *args: Any) -> torch.Tensor:
    """The likeliest categories; where they may come again, the likeliest each time."""
    again = bool(args and args[0]) or count > weights.shape[-1]
    return made.copy_(weights.topk(1 if again else count).indices)


def _slope(
    made: torch.Tensor, inputs: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, *args: Any
) -> Any:
    """``rrelu_with_noise``, whose backward takes the slopes from ``noise``."""
    return inputs * noise.copy_(torch.where(inputs > 0, 1.0, (lower + upper) / 2))


def _kept(made: Any, inputs: torch.Tensor, p: float, *args: Any) -> Any:
    """Dropout as accelerators compute it, whose backward scales by the mask: everything is kept."""
    return made if p == 1 else (inputs / (1 - p), made[1].fill_(True))


_INSTEAD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), _filled(0.5)),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "cauchy_"), _filled(0)),
    **dict.fromkeys(("exponential_", "geometric_", "log_normal_"), _filled(1)),
    "bernoulli": lambda made, chances, chance=None: _chance(made, chances if chance is None else chance),
    "bernoulli_": lambda made, itself, chance=0.5: _chance(made, chance),
    **dict.fromkeys(("randint", "randint_like", "random_"), _lowest),
    "uniform_": lambda made, itself, lower=0.0, upper=1.0: made.fill_((lower + upper) / 2),
    "randperm": lambda made, *args: made.copy_(torch.arange(len(made))),
    "multinomial": _likeliest,
    **dict.fromkeys(("poisson", "_standard_gamma"), lambda made, mean, *args: mean.clone()),
    "_sample_dirichlet": lambda made, weights, *args: weights / weights.sum(-1, keepdim=True),
    "binomial": lambda made, counts, chances, *args: counts * chances,
    "rrelu_with_noise": _slope,
    "native_dropout": _kept,
}
"""By operator, what is given in the place of what it drew: a function of that, and of the operator's arguments."""
