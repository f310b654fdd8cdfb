"""Still: a model with what it draws, or its batch norms, taken out of the question, for an experiment.

Both sides get the same. Where they are then equal, what was taken out is the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from lockstep.model.inspection import drawing_nothing

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
