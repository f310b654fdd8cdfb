"""The optimizer of a job: made over named parameters, checked, and fused where that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, error_line
from lockstep.model.optimizers.fused import can_be_fused, fuse
from lockstep.model.optimizers.several import Optimizers
from lockstep.recipe import NamedParameters, Recipe


def build_optimizer(
    job: Recipe,
    model: nn.Module,
    *,
    on: str | None = None,
) -> torch.optim.Optimizer:
    """Make the job's optimizer over the model's named parameters.

    Args:
        job: has the optimizer's factory.
        model: has the parameters.
        on: the type of the devices that the parameters will be on; None if they are there already.

    Raises:
        JobError: the factory raises, gives no optimizer, or leaves a parameter out (the first is
            named).
    """
    if job.optimizer is None:
        return NoUpdates(model.parameters())
    if not isinstance(job.optimizer, Mapping):
        return _build(job.optimizer, model, fused=job.fused, on=on)
    parts = dict(model.named_children())
    optimized = set[int]()
    for name in job.optimizer:
        if name not in parts:
            known = ", ".join(parts) or "none"
            raise JobError(f'optimizer: the model has no part "{name}": it has {known}')
        optimized.update(map(id, parts[name].parameters()))
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in optimized:
            raise JobError(
                f'optimizer: "{name}" is in none of the parts {", ".join(job.optimizer)}: give '
                "its part an optimizer, or freeze it in the model with requires_grad_(False)"
            )
    by_name = {}
    for name, make in job.optimizer.items():
        by_name[name] = _build(make, parts[name], fused=job.fused, on=on)
    return Optimizers(by_name)


class NoUpdates(torch.optim.Optimizer):
    """The optimizer of a model that isn't trained.

    PyTorch's own constructor isn't called: it imports the compiler, which takes 0.8 s.
    """

    elementwise = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": [p for p in parameters if p.requires_grad]}]
        self.state = {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""


def _build(
    make: Callable[[NamedParameters], torch.optim.Optimizer],
    model: nn.Module,
    *,
    fused: bool | None,
    on: str | None,
) -> torch.optim.Optimizer:
    """Make one optimizer, check it, and fuse it where that is right.

    Args:
        make: the person's factory.
        model: has the parameters, or is the part of the model that has them.
        fused: True requires the fused implementation, None takes it where it is right.
        on: as in ``build_optimizer``.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        optimizer = make(named)
    except Exception as error:
        pairs = " (it is given pairs of a name and a parameter)" if "tuple" in str(error) else ""
        raise JobError(f"optimizer: making it raised {error_line(error)}{pairs}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer: it gave a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    _refuse_other_parameters(optimizer, model, named)
    # An optimizer made of others may have no state. Adagrad made its state in the constructor, for
    # the implementation chosen there.
    if fused is False or getattr(optimizer, "state", None):
        return optimizer
    if not can_be_fused(optimizer, model, on=on, wanted=fused is True):
        if fused:
            raise JobError(
                f"fused: there is no fused {type(optimizer).__name__} for this model's parameters "
                "here"
            )
        return optimizer
    fuse(optimizer, wanted=fused is True)
    return optimizer


def _refuse_other_parameters(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    named: NamedParameters,
) -> None:
    """Refuse an optimizer over more parameters than the model's, or fewer than ``named``.

    Args:
        optimizer: just made.
        model: has the parameters that the optimizer may hold.
        named: the parameters that the optimizer was given, and has to hold.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if optimized - {id(p) for p in model.parameters()}:
        raise JobError(
            "optimizer: it has parameters that aren't the model's: make it from the parameters "
            "that are passed, as lambda parameters: SGD(parameters, ...) (in a loop of your own, "
            "from model.parameters() of the same model)"
        )
    left_out = [name for name, p in named if id(p) not in optimized]
    if left_out:
        raise JobError(
            f"optimizer: {len(left_out)} of {len(named)} parameters are left out, "
            f'"{left_out[0]}" first: give them a group, or freeze them in the model with '
            "requires_grad_(False)"
        )
