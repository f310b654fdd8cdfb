"""Still: a model with dropout, all that it draws, or its batch norms taken out of the question.

Both sides get the same. Dropout is out from the start, where its masks would differ; of the others
an experiment shows whether they are the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn

from lockstep.job import Job
from lockstep.model.build import as_module
from lockstep.model.inspection import drawing_nothing

Thing = Literal["dropout", "draws", "norms"]


def without_draws(job: Job, things: frozenset[Thing]) -> Job:
    """Return the job with dropout, or all random numbers, out of its model and step function."""
    if not things - {"norms"}:
        return job
    step = job.step and functools.partial(_still, job.step, things)
    return job.replace(model=functools.partial(_built, job.model, things), step=step)


def _built(build: Callable[[], nn.Module], things: frozenset[Thing]) -> nn.Module:
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
