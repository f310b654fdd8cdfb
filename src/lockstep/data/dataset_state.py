"""The state of a dataset that has one, so that a resumed training goes on in it.

``state_dict()`` and ``load_state_dict(state)``, as torchdata and ``datasets`` have them;
``state_dict`` of MosaicML's StreamingDataset takes the number of samples that were used.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from lockstep.errors import JobError, error_line

_SAMPLES = {"num_samples", "from_beginning"}


def has_state(thing: Any) -> bool:
    """Return whether it has a state to be saved."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(dataset: Any, samples: int = 0) -> Any:
    """Return a copy of its state, ``samples`` having been used of this epoch."""
    if set(inspect.signature(dataset.state_dict).parameters) >= _SAMPLES:
        return copy.deepcopy(dataset.state_dict(num_samples=samples, from_beginning=True))
    return copy.deepcopy(dataset.state_dict())


def load_state(dataset: Any, state: Any, name: str) -> None:
    """Give it a state back.

    Raises:
        JobError: it doesn't take it; ``name`` is the job's field.
    """
    try:
        dataset.load_state_dict(state)
    except Exception as error:
        raise JobError(f"{name}: load_state_dict raised {error_line(error)}") from error


def forgets_samples(dataset: Any) -> bool:
    """Return whether its state lacks samples that it has read: those in a shuffle buffer of
    ``datasets``.
    """
    todo = [getattr(dataset, "_ex_iterable", None)]
    while todo:
        if (one := todo.pop()) is None:
            continue
        if type(one).__name__.startswith("BufferShuffled"):
            return True
        todo += [getattr(one, "ex_iterable", None), *getattr(one, "ex_iterables", ())]

    return False
