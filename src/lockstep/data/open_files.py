"""Open files among a dataset's attributes.

A forked process shares the position of each file that was open before the fork, and reading moves
it: of two loader workers that seek and read, one would read where the other went.
"""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Iterable
from itertools import islice
from types import ModuleType
from typing import Any

from torch.utils.data import ConcatDataset, Subset

_LEVELS = 5
"""Three levels of attributes, with lists, tuples or dictionaries between them."""

_ITEMS = 16
"""Items that are looked at of a list, a tuple or a dictionary: the others are of the same kind."""


def shared_file(dataset: Any) -> str | None:
    """Return the name of an open file (``reader.file``) that forked workers would share, or None.

    A file that the dataset's own ``__getstate__`` leaves out is not shared: workers take a copy of
    the dataset.
    """
    if not (files := _open_files(dataset)):
        return None
    kept = _open_files(_by_state(dataset))
    return next((name for key, name in files.items() if key in kept), None)


def with_own_files(dataset: Any) -> Any:
    """Return the dataset for a loader worker: a copy by ``__getstate__`` where it has open
    files.
    """
    return _by_state(dataset) if _open_files(dataset) else dataset


def _by_state(dataset: Any) -> Any:
    """Return a copy made by the dataset's own ``__getstate__``; without one, the dataset itself."""
    if type(dataset) is Subset:
        return Subset(_by_state(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset(map(_by_state, dataset.datasets))
    if getattr(type(dataset), "__getstate__", None) is object.__getstate__:
        return dataset
    return copy.copy(dataset)


def _open_files(dataset: Any) -> dict[int, str]:
    """Find the open files among the attributes of a dataset, and name each by its id."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    level = [("", one) for one in _under(dataset)]
    for _ in range(_LEVELS + 1):
        below: list[tuple[str, Any]] = []
        for name, thing in level:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if _is_open_file(thing):
                found[id(thing)] = name
            else:
                below += [(f"{name}.{key}".strip("."), value) for key, value in _inside(thing)]
        level = below
    return found


def _under(dataset: Any) -> list[Any]:
    """List a dataset and those that it is made of, by ``Subset`` and ``ConcatDataset``."""
    found = [dataset]
    if isinstance(dataset, Subset):
        found += _under(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            found += _under(part)
    return found


def _inside(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, dict | list | tuple):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return islice(items, _ITEMS)
    attributes = getattr(thing, "__dict__", None)
    if isinstance(thing, ModuleType) or not isinstance(attributes, dict):
        return ()
    return attributes.items()


def _is_open_file(thing: Any) -> bool:
    """Whether it is an open file that can be read. A log, which is only written, is none."""
    library = type(thing).__module__.partition(".")[0]
    if library == "multiprocessing":  # its queues are made to be shared
        return False
    try:
        if library == "h5py" or isinstance(thing, sqlite3.Connection):
            return bool(thing)  # closed files, groups and datasets of h5py are false
        is_open = hasattr(type(thing), "fileno") and thing.fileno() >= 0
        return is_open and getattr(thing, "readable", lambda: True)()
    except Exception:  # it is closed, or in memory
        return False
