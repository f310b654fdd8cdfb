"""Still: a model with what it draws, or its batch norms, taken out of the question, for an experiment.

Both sides get the same. Where they are then equal, what was taken out is the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
        model.forward = functools.partial(_within, _Still, model.forward)


def still_backward(backward: Callable[..., Any], things: frozenset[Thing]) -> Callable[..., Any]:
    """A step's backward in which nothing is drawn, where draws are among the things."""
    return functools.partial(_within, _StillBelow, backward) if "draws" in things else backward


def _within(mode: Callable[[], Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode():
        return function(*args, **kwargs)


class _Still(TorchFunctionMode):
    """In this thread dropout passes on what it gets, and what is drawn is 0 (a choice between 0 and 1: 1)."""

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
        made = func(*args, **kwargs)
        if func in _NUMBERS:
            made.detach().zero_()
        elif func in _CHOICES:
            made.detach().fill_(1)
        return made


_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
_NUMBERS = {
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal),
    *(torch.Tensor.normal_, torch.Tensor.uniform_),
}
_CHOICES = {torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_}


class _StillBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same for a backward, which PyTorch (2.13) runs outside of the modes for its functions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _NUMBERS_BELOW:
            made.zero_()
        elif name in _CHOICES_BELOW:
            made.fill_(1)
        elif name == "native_dropout":  # of a checkpoint's second forward
            return args[0].clone(), made[1].fill_(True)
        return made


_NUMBERS_BELOW = {"rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_"}
_CHOICES_BELOW = {"bernoulli", "bernoulli_"}
