"""What an earlier training of this process has left in a job's objects, which the next one begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeAlias

import torch

from lockstep.job import Job
from lockstep.model.given_modules import was_given_before
from lockstep.model.inspection.small_values import small_in
from lockstep.training.setup import variables_of

_Place: TypeAlias = tuple[str, int]
"""``"Focal.gamma"`` and the id of the object; or the name of a variable, and 0."""

_left: dict[_Place, object] = {}
"""What trainings have made of what is there, as a hash or as text."""


def _variables(job: Job) -> dict[_Place, object]:
    """What is small in the job's objects, and in the variables that its functions and classes use.

    Callbacks are left out: each training has copies, and what functions of events gather is for the person.
    """
    job = job.replace(callbacks=(), on_event=())
    found: dict[_Place, object] = {(name, 0): its for name, its in variables_of(job).items()}
    seen: set[int] = set()
    for one in (job.loss, job.train_data, job.order, job.collate, *_each(job.eval_data), *_each(job.metrics)):
        if one is not None and not isinstance(one, torch.Tensor | type | FunctionType):
            found |= {(path, id(one)): repr(its) for path, its in small_in(type(one).__name__, one, seen)}
    return found


def _each(given: Any) -> Iterable[Any]:
    return given.values() if isinstance(given, Mapping) else (given,)


@contextmanager
def begun_with(job: Job, say: Callable[[str], None], *, resumed: bool) -> Iterator[None]:
    """A training, in which ``job`` trains; what earlier ones of this process have left is said.

    Args:
        job: whose training it is.
        say: shows a line.
        resumed: its weights are those of its run.
    """
    before = _variables(job)
    if not resumed and was_given_before(job):
        say(
            "model: its function gives a module or parameter that this process has used before, so that this training "
            "begins with the weights that it has now: let it build a new one (lambda: Net())"
        )
    kept = [place for place, its in before.items() if _left.get(place) == its and "._parameters[" not in place[0]]
    if kept:
        say(
            f'"{kept[0][0]}" has the value that an earlier training of this process gave it, and this one begins with '
            "that: set it, or make the job anew, before each training"
        )
    try:
        yield
    finally:
        for place, its in _variables(job).items():
            was_there = place in before or "[" not in place[0]  # (or is kept in a list or dict that grows: a cache)
            if was_there and before.get(place) != its:
                _left[place] = its
