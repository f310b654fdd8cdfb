"""The learning rate's scheduler of a job: made over a step's optimizer, and moved on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from lockstep.errors import JobError, error_line
from lockstep.job import Job
from lockstep.model.optimizers.several import Optimizers
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result


def scheduler_of(job: Job, step: Step) -> Any:
    """Make the job's scheduler over the step's optimizer; None where it has none.

    Raises:
        JobError: making it raised, or it is over another optimizer.
    """
    make = job.lr_scheduler
    if make is None:
        return None
    if isinstance(make, Mapping):
        assert isinstance(step.optimizer, Optimizers)
        by_name = step.optimizer.by_name
        schedulers = {}
        for name, make_one in make.items():
            schedulers[name] = _made(make_one, by_name[name])
        return Schedulers(schedulers)

    return _made(make, step.optimizer)


class Schedulers:
    """The schedulers of several optimizers, by name."""

    def __init__(self, by_name: dict[str, Any]) -> None:
        self.by_name = by_name

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: scheduler.state_dict() for name, scheduler in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        for name, scheduler in self.by_name.items():
            scheduler.load_state_dict(state[name])


def _made(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Make one scheduler over an optimizer."""
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise JobError(f"lr_scheduler: making it raised {error_line(error)}") from error

    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise JobError(
            "lr_scheduler: the scheduler has another optimizer than the one passed to the function"
        )

    if not hasattr(scheduler, "state_dict"):
        raise JobError(
            f"lr_scheduler: the function gave a {type(scheduler).__name__}, which has no "
            "state_dict: give one that makes a scheduler of the optimizer "
            "(lambda optimizer: StepLR(optimizer, 10))"
        )

    return scheduler


def refuse_too_short(scheduler: Any, moves: int | None) -> None:
    """Refuse a OneCycleLR that would raise before the end of the training.

    Args:
        scheduler: of the job.
        moves: how often the training moves it on; None where that isn't known.

    Raises:
        JobError: the scheduler is made for fewer.
    """
    if isinstance(scheduler, Schedulers):
        for one in scheduler.by_name.values():
            refuse_too_short(one, moves)
        return

    if moves is None or not isinstance(scheduler, OneCycleLR):
        return
    length = scheduler.total_steps
    if moves > length:
        raise JobError(
            f"lr_scheduler: OneCycleLR has total_steps={length}, but {moves} steps are due: set "
            f"total_steps={moves}"
        )


def move_on(scheduler: Any, loss: float | Result | None) -> None:
    """Move a scheduler on by one.

    Args:
        scheduler: of the job; None does nothing.
        loss: for a scheduler that looks at a loss; where there is none, that one stays.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, Schedulers):
        for one in scheduler.by_name.values():
            move_on(one, loss)
        return

    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif isinstance(loss, Result):
        if not loss.skipped:
            scheduler.step(loss.loss)
    elif loss is not None:
        scheduler.step(loss)
