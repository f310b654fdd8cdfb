"""The dataset of a job: given as it is, or by a callable that may have to make it first (a
download, say).

``predict`` takes data by name, too (``eval``, ``eval:NAME``, ``train``, ``FILE.py:NAME``), and
samples without targets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.data.fetch import Collate, base_of, together
from lockstep.errors import InputError, JobError, LockstepError, error_line, nearest
from lockstep.job import Job
from lockstep.jobfile import loaded
from lockstep.launch.world import World


def resolve(source: Any, world: World, name: str = "train_data") -> Any:
    """Return the dataset that ``source`` is, or gives when it is called: map-style, or a stream.

    A callable is called on the first rank of each node before the others, so that files are made
    once. Every rank has to call this; where one's callable raises, every rank raises. A callable
    that gives an iterator (a generator function) is the stream itself, and is called again for each
    epoch.

    Args:
        source: an object with ``__getitem__`` and ``__len__``, or one with ``__iter__``, or a
            callable without arguments that gives one.
        world: who else calls.
        name: the job's field, for messages.

    Raises:
        JobError: it is no dataset, it is empty, or the callable raised (what it says itself, if
            that is one of ours).
    """
    source = _given(source, world, name)
    several = source[:8] if isinstance(source, list | tuple) else [source]
    if any(isinstance(one, DataLoader) for one in several):
        raise JobError(
            f"{name}: a DataLoader cuts batches for one device: give its dataset (combine "
            "several by ConcatDataset), and set batch_size, collate and loader_workers in the "
            "job"
        )
    if isinstance(source, GeneratorType):
        raise JobError(
            f"{name}: a generator can be iterated only once: give the function that makes it"
        )
    if is_stream(source):
        return source

    if not _is_map_style(source):
        raise JobError(
            f"{name}: {type(source).__name__} is no dataset: it needs __getitem__ and __len__, or "
            "__iter__"
        )

    if isinstance(source, Mapping) and source and all(isinstance(key, str) for key in source):
        raise JobError(
            f"{name}: sets by name are for eval_data; combine them by "
            "torch.utils.data.ConcatDataset"
        )

    if not len(source):
        raise JobError(f"{name}: it is empty")
    return source


def resolve_sets(source: Any, world: World, name: str = "eval_data") -> dict[str, Any]:
    """Return the evaluation sets by name; one that was given without a name has the name "".

    Args:
        source: as in ``resolve``, or a dict of such by name, or a callable that gives a dict.
        world: who else calls.
        name: the job's field, for messages.

    Raises:
        JobError: as in ``resolve``; a name is no text.
    """
    source = _given(source, world, name)
    if not isinstance(source, Mapping):
        return {"": resolve(source, world, name)}
    if not source:
        raise JobError(f"{name}: the dict has no sets in it")
    for key in source:
        if not isinstance(key, str) or not key:
            raise JobError(f"{name}: the name of a set is {key!r}, a text is expected")

    return {key: resolve(value, world, f'{name}["{key}"]') for key, value in source.items()}


def source_of(job: Job, data: Any) -> tuple[str, Any]:
    """Return what the data are called in messages, and what gives them."""
    if not isinstance(data, str):
        return "data", data
    if data == "train":
        return "train_data", job.train_data
    if data == "eval" or data.startswith("eval:"):
        if job.eval_data is None:
            raise JobError(
                "eval_data: the job has none; predict on train, or name data as file.py:NAME"
            )
        return "eval_data", job.eval_data

    file, _, name = data.rpartition(":")
    if not file or not name:
        known = nearest(data, ["eval", "eval:NAME", "train", "FILE.py:NAME"])
        raise InputError(f'data: there is no dataset "{data}"; {known}')
    module = vars(loaded(file))
    if name in module:
        return data, module[name]
    names = [
        each
        for each, value in module.items()
        if not each.startswith("_") and not isinstance(value, ModuleType | type)
    ]
    raise InputError(f'{file}: there is no "{name}" in it; {nearest(name, names)}')


def one_of(sets: Mapping[str, Any], wanted: str) -> Any:
    """Return the evaluation set that ``eval`` or ``eval:NAME`` means."""
    name = wanted.partition(":")[2]
    if name in sets:
        return sets[name]
    known = [f"eval:{each}" if each else "eval" for each in sets]
    raise InputError(
        f"{wanted}: the job's evaluation sets are {', '.join(known)}: take one of them"
    )


def inputs_of(dataset: Any, collate: Collate | None, name: str) -> tuple[Any, Collate | None]:
    """Return for predicting the dataset, and a collate of samples that may be ``(inputs,
    targets)`` or inputs alone.

    Args:
        dataset: map-style.
        collate: the job's, which is given the samples as they are; it gives a pair, or inputs
            alone.
        name: what the dataset is called in messages.

    Raises:
        InputError: it has no length.
    """
    if not _is_map_style(dataset):
        raise InputError(
            f"{name}: a stream has no length, and predicting needs one: give a list of the "
            "samples, or a dataset with __getitem__ and __len__"
        )

    if collate is None:
        if isinstance(dataset, Tensor) and dataset.is_cpu:
            dataset = TensorDataset(dataset)
        if type(dataset) is TensorDataset and len(dataset.tensors) == 1:
            dataset = TensorDataset(*dataset.tensors, torch.zeros(1).expand(len(dataset)))
        base = base_of(dataset)
        if type(base) is TensorDataset and len(base.tensors) == 2:
            return dataset, None  # tensors are indexed, as in training
    return dataset, functools.partial(_collated, collate, name)


def _collated(collate: Collate | None, name: str, samples: list[Any]) -> tuple[Any, Any]:
    if collate is not None:
        return _inputs(collate(samples)), None
    return together([(_inputs(sample), 0) for sample in samples], None, name)


def _inputs(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple | list) and len(sample) == 2 else sample


class Recalled:
    """A stream that is made anew by a function each time it is iterated."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self._function = function
        self.draws_random = getattr(function, "draws_random", True)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function())


def is_stream(source: Any) -> bool:
    """Return whether it can only be iterated."""
    return hasattr(source, "__iter__") and not _is_map_style(source)


def _is_map_style(source: Any) -> bool:
    if isinstance(source, IterableDataset):
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _given(source: Any, world: World, name: str) -> Any:
    """Return what a callable gives; anything else is the data itself."""
    is_data = not isinstance(source, type) and (_is_map_style(source) or is_stream(source))
    if is_data or not callable(source):
        return source
    made = _called(source, world, name)
    read_once = isinstance(made, Iterator) and not isinstance(made, IterableDataset)
    return Recalled(source) if read_once else made


def _called(source: Any, world: World, name: str) -> Any:
    """Return what the callable gives: the first rank of each node goes first, and every rank
    learns how it went.
    """
    where = f" on rank {world.rank}" if world.size > 1 else ""
    made: Any = None
    for mine in (world.local_rank == 0, world.local_rank > 0):
        failure: Exception | None = None
        message: str | None = None
        if mine:
            try:
                made = source()
            except LockstepError as error:  # its words are written for the person who reads them
                failure = error
                message = str(error)
            except Exception as error:
                failure = error
                message = f"{name}: calling it{where} raised {error_line(error)}"
        # Also the barrier: the others wait here for the first, and learn whether to go on.
        for theirs in world.gather_objects(message):
            if theirs is not None:
                raise JobError(theirs) from failure

    return made
