"""Whether data are the same on every rank, as far as a few samples tell."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from lockstep.data.fetch import base_of, lookup_of, number_of
from lockstep.data.source import is_stream
from lockstep.errors import JobError
from lockstep.launch.world import World

_LOOKED_AT = 1000
"""Indices and rows by which the data of ranks are compared."""


def same_on_every_rank(dataset: Any, world: World, name: str) -> None:
    """Make sure that all ranks have the same data, as far as that shows without asking a dataset
    for samples.

    A dataset of a class of one's own is only compared by its length: fetching would open files
    before loader workers are made. Streams are compared while they are read.

    Raises:
        JobError: they haven't; every rank raises.
    """
    if world.size == 1 or is_stream(dataset):
        return
    (length, number), *others = world.gather_objects((len(dataset), _number(dataset)))
    for rank, (other_length, other) in enumerate(others, start=1):
        if other_length != length:
            raise JobError(
                f"{name}: it has {length} samples on rank 0 and {other_length} on rank {rank}: "
                "every rank needs the whole dataset (don't cut it by rank)"
            )
        if other != number:
            raise JobError(
                f"{name}: the samples on rank {rank} differ from those on rank 0",
                kind="unseeded data",
                fix="seed the code that makes or splits them (random_state=0 in scikit-learn, "
                "default_rng(0) in numpy)",
            )


def _number(dataset: Any) -> int:
    """Return a number made of some indices of a ``Subset`` and of some rows of tensors."""
    made: list[Any] = []
    lookup = lookup_of(dataset)
    if lookup is not None:
        made.append(lookup[:_LOOKED_AT])
    base = base_of(dataset)
    if type(base) is TensorDataset:
        for tensor in base.tensors:
            made.append(tensor[:: max(1, len(tensor) // _LOOKED_AT)][:_LOOKED_AT])

    return number_of(made)
