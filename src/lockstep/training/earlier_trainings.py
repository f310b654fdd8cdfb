"""What an earlier training of this process has left in a job's objects, which the next one begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.model.given_modules import was_given_before
from lockstep.model.inspection import OutsideVariables
from lockstep.model.inspection.small_values import small_in

_Place: TypeAlias = tuple[str, int]
"""``"Focal.gamma"``, or the name of a variable, and the id of the loss, or 0."""

_left: dict[_Place, object] = {}
"""What trainings have made of what is there, as a hash or as text."""


def _variables(job: Job) -> dict[_Place, object]:
    """What is small in the loss, and in the variables that the functions of the model and of the training use."""
    functions = (job.model, job.loss, job.step, job.optimizer, job.lr_scheduler)
    found: dict[_Place, object] = {
        (name, 0): its for name, its in OutsideVariables(f for f in functions if callable(f)).small_prints().items()
    }
    if isinstance(job.loss, nn.Module):
        found |= {(path, id(job.loss)): repr(its) for path, its in small_in(type(job.loss).__name__, job.loss, set())}
    return found


@contextmanager
def begun_with(job: Job | JobFile, *, resumed: bool) -> Iterator[list[str]]:
    """A training; gives what to say of earlier ones of this process.

    Args:
        job: that trains within; each training loads a file anew.
        resumed: its weights are those of its run.
    """
    if isinstance(job, JobFile):
        yield []
        return
    said = []
    before = _variables(job)
    if not resumed and was_given_before(job):
        said.append(
            "model: its function gives a module or parameter that this process has used before, so that this training "
            "begins with the weights that it has now: let it build a new one (lambda: Net())"
        )
    if kept := [place for place, its in before.items() if _left.get(place) == its]:
        said.append(
            f'"{kept[0][0]}" has the value that an earlier training of this process gave it, and this one begins with '
            "that: set it, or make the job anew, before each training"
        )
    try:
        yield said
    finally:
        _left.update((place, its) for place, its in _variables(job).items() if before.get(place, its) != its)
