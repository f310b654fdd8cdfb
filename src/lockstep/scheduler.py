"""The learning rate's scheduler of a job: made over a step's optimizer, and moved on."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import JobError, told
from lockstep.job import Job
from lockstep.step import Result, Step


def scheduler_of(job: Job, step: Step) -> Any:
    """The job's scheduler over the step's optimizer, or None.

    Raises:
        JobError: making it raised.
    """
    if job.lr_scheduler is None:
        return None
    try:
        return job.lr_scheduler(step.optimizer)
    except Exception as error:
        raise JobError(f"lr_scheduler: making it raised {told(error)}") from error


def move_on(scheduler: Any, loss: float | Result) -> None:
    """Move a scheduler on by one; one that looks at a loss is shown this one."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss.loss if isinstance(loss, Result) else loss)
    else:
        scheduler.step()
