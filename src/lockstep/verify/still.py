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
        model.forward = functools.partial(_without_draws, model.forward)


def _without_draws(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Still():
        return forward(*args, **kwargs)


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
