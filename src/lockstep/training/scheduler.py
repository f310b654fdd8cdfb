"""The learning rate's scheduler of a job: made over a step's optimizer, and moved on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from lockstep.errors import JobError, told
from lockstep.job import Job
from lockstep.model.optimizers import Optimizers
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result


def scheduler_of(job: Job, step: Step) -> Any:
    """The job's scheduler over the step's optimizer, or None.

    Raises:
        JobError: making it raised, or it is over another optimizer.
    """
    if job.lr_scheduler is None:
        return None
    if not isinstance(job.lr_scheduler, Mapping):
        scheduler = _made(job.lr_scheduler, step.optimizer)
        if step.keeps_shards and not _is_of_pytorch(scheduler):
            with step.whole_parameters():  # which it may read where it is made
                scheduler = _made(job.lr_scheduler, step.optimizer)
        return scheduler
    assert isinstance(step.optimizer, Optimizers)
    return Schedulers(
        {name: _made(make, step.optimizer.by_name[name]) for name, make in job.lr_scheduler.items()}
    )


class Schedulers:
    """Those of several optimizers, by name."""

    def __init__(self, by_name: dict[str, Any]) -> None:
        self.by_name = by_name

    def state_dict(self) -> dict[str, Any]:
        """Of each, by name."""
        return {name: scheduler.state_dict() for name, scheduler in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
        for name, scheduler in self.by_name.items():
            scheduler.load_state_dict(state[name])


def _made(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        scheduler = make(optimizer)
    except Exception as error:
        raise JobError(f"lr_scheduler: making it raised {told(error)}") from error
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise JobError(
            "lr_scheduler: it was made over another optimizer than the one that the function is "
            "given"
        )
    if not hasattr(scheduler, "state_dict"):
        raise JobError(
            f"lr_scheduler: the function gave a {type(scheduler).__name__}, which has no "
            "state_dict: give one that "
            "makes a scheduler of the optimizer (lambda optimizer: StepLR(optimizer, 10))"
        )
    return scheduler


def note_on_length(scheduler: Any, moves: int | None, every: str) -> str | None:
    """What the person has to know where a scheduler of a fixed length is moved on more or less
    often than that.

    ``moves`` is how often the training moves it on, once in ``every`` step or epoch; None where
    that isn't known.

    Raises:
        JobError: it would raise before the end.
    """
    if isinstance(scheduler, Schedulers):
        notes = [note_on_length(one, moves, every) for one in scheduler.by_name.values()]
        return next((note for note in notes if note is not None), None)
    if moves is None or not isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        return None
    length = scheduler.total_steps
    once = "once a step" if every == "step" else "once an epoch"
    said = f"OneCycleLR is made for total_steps={length}, and is moved on {moves} times, {once}"
    if moves > length:
        raise JobError(f"lr_scheduler: {said}")
    return (
        f'{said}: lr_scheduler_every="step" moves it on more often'
        if every == "epoch" and moves < length
        else None
    )


def move_on(scheduler: Any, loss: float | Result | None, step: Step) -> None:
    """Move a scheduler on by one; one that looks at a loss is shown this one, and stays where there
    is none.

    One that isn't PyTorch's may read what the optimizer of the ``step`` has: it is lent what it has
    on one device.
    """
    if isinstance(scheduler, Schedulers):
        for one in scheduler.by_name.values():
            move_on(one, loss, step)
        return
    if scheduler is None:
        return
    with nullcontext() if _is_of_pytorch(scheduler) else step.whole_parameters():
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step()
        elif isinstance(loss, Result):
            if not loss.skipped:
                scheduler.step(loss.loss)
        elif loss is not None:
            scheduler.step(loss)


def _is_of_pytorch(scheduler: Any) -> bool:
    """Whether its class, and those of schedulers in it, are PyTorch's own."""
    within = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__ == "torch.optim.lr_scheduler" and all(
        map(_is_of_pytorch, within)
    )
