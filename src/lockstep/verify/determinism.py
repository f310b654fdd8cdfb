"""Still: a model with what it draws, or its batch norms, taken out of the question, for an experiment.

Both sides get the same. Where they are then equal, what was taken out is the cause.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
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
        model.forward = functools.partial(_within, (_Still, _StillBelow), model.forward)


def still_backward(backward: Callable[..., Any], things: frozenset[Thing]) -> Callable[..., Any]:
    """A step's backward in which nothing is drawn, where draws are among the things."""
    # PyTorch (2.13) runs it outside of the modes for its functions.
    return functools.partial(_within, (_StillBelow,), backward) if "draws" in things else backward


def _within(modes: Sequence[Callable[[], Any]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        return function(*args, **kwargs)


class _Still(TorchFunctionMode):
    """In this thread dropout passes on what it gets."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}


class _StillBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch's operators draw from its own generators, wherever they are called, is the same for every sample.

    The generators stand afterwards where they did, so that what is drawn in another way still shows.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        instead = _DRAWN.get(func.overloadpacket.__name__)
        if instead is None:
            return func(*args, **kwargs)
        given = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
        with kept_state_on(kwargs.get("device") or given or torch.device("cpu")):
            made = func(*args, **kwargs)
        return instead(made, *args)


def _filled(value: float) -> Callable[..., torch.Tensor]:
    return lambda made, *args: made.fill_(value)


def _lowest(made: torch.Tensor, *args: Any) -> torch.Tensor:
    """``randint`` and its like: the lowest that may come, which is given where there are two bounds."""
    bounds = [arg for arg in args if isinstance(arg, int)]
    return made.fill_(bounds[0] if len(bounds) > 1 else 0)


def _counted(made: torch.Tensor, *args: Any) -> torch.Tensor:
    return made.copy_(torch.arange(len(made), dtype=made.dtype))


def _first(made: torch.Tensor, weights: torch.Tensor, count: int, *args: Any) -> torch.Tensor:
    """The likeliest categories; where they may come again, the likeliest each time."""
    again = bool(args and args[0]) or count > weights.shape[-1]
    return made.copy_(weights.topk(1 if again else count).indices)


def _between(made: torch.Tensor, *args: Any) -> torch.Tensor:
    """``uniform_``: the middle of its bounds."""
    bounds = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :])
    return made.fill_(sum(bounds) / 2)


def _centre(made: torch.Tensor, mean: Any, *args: Any) -> torch.Tensor:
    return made.copy_(torch.as_tensor(mean))


def _centred(made: torch.Tensor, itself: torch.Tensor, mean: float = 0.0, *args: Any) -> torch.Tensor:
    return made.fill_(mean)


def _sloped(
    made: torch.Tensor, inputs: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, *args: Any
) -> Any:
    """``rrelu_with_noise``, whose backward takes the slopes from ``noise``."""
    return inputs * noise.copy_(torch.where(inputs > 0, 1.0, (lower + upper) / 2))


# What is drawn is neither at an end of its range nor unlikely: a mask made of it keeps most, as the real one does.
_DRAWN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), _filled(0.5)),
    **dict.fromkeys(("randn", "randn_like", "cauchy_"), _filled(0)),
    **dict.fromkeys(("bernoulli", "bernoulli_", "exponential_", "geometric_", "log_normal_"), _filled(1)),
    **dict.fromkeys(("randint", "randint_like", "random_"), _lowest),
    "uniform_": _between,
    "normal": _centre,
    "normal_": _centred,
    "randperm": _counted,
    "multinomial": _first,
    **dict.fromkeys(("poisson", "_standard_gamma"), lambda made, mean, *args: mean.clone()),
    "_sample_dirichlet": lambda made, weights, *args: weights / weights.sum(-1, keepdim=True),
    "binomial": lambda made, counts, chances, *args: counts * chances,
    "rrelu_with_noise": _sloped,
    "native_dropout": lambda made, inputs, *args: (inputs.clone(), made[1].fill_(True)),
}
