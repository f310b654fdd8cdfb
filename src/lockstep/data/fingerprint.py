"""Whether data are the same: on every rank, and as when a run was begun, as far as a few samples
tell.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import TensorDataset

from lockstep.data.fetch import Collate, Fetcher, base_of, lookup_of, number_of
from lockstep.data.shares import Batch
from lockstep.data.source import is_stream
from lockstep.errors import JobError
from lockstep.launch.world import World
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import holds_packed, named_tensors
from lockstep.tensors.rows import cut

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
                "every rank has to have "
                "all of it (don't cut it by rank), and keeps its share"
            )
        if other != number:
            raise JobError(
                f"{name}: its samples are others on rank {rank} than on rank 0",
                kind="unseeded data",
                fix="seed what makes or splits them (random_state=0 in scikit-learn, "
                "default_rng(0) in numpy)",
            )


def _number(dataset: Any) -> int:
    """A number made of some indices of a ``Subset`` and of some rows of tensors, 0 where neither
    is there.
    """
    base, lookup = base_of(dataset), lookup_of(dataset)
    made: list[Any] = [] if lookup is None else [lookup[:_LOOKED_AT]]
    if type(base) is TensorDataset:
        made += [t[:: max(1, len(t) // _LOOKED_AT)][:_LOOKED_AT] for t in base.tensors]
    return number_of(made)


def fingerprint(batch: Batch, samples: int | None, collate: Collate | None) -> dict[str, Any]:
    """The number of samples, and a hash of the first one of a batch that was fetched anyway.

    A collate of a person's own may make other rows of a sample in each batch, so then there is no
    hash.

    Args:
        batch: of this process.
        samples: how many there are in all; None for a stream, of which nothing is kept.
        collate: the job's.
    """
    if samples is None:
        return {}
    shares = batch.shares or [batch.parts]
    part = next((part for share in shares for part in share if part.size), None)
    if (
        collate is not None
        or part is None
        or part.samples is None
        or holds_packed((part.inputs, part.targets))
    ):
        return {"samples": samples}
    row = cut((part.inputs, part.targets), 0, 1, part.size)
    return {
        "samples": samples,
        "sample": int(part.samples[0]),
        "epoch": batch.epoch,
        "hash": _hash(row),
    }


def change_of(before: dict[str, Any], dataset: Any, *, seed: int, name: str) -> str | None:
    """What is other than it was, in a line; None where nothing is."""
    if not before or is_stream(dataset):
        return None
    if before["samples"] != len(dataset):
        return (
            f"{name} has {len(dataset):,} samples, and had {before['samples']:,} when the run was "
            "begun: its batches "
            "are other ones now"
        )
    if "hash" not in before:
        return None
    index = before["sample"]
    hashes = [
        _hash(Fetcher(dataset, seed=seed)(before["epoch"], [[index]])[0][0]) for _ in range(2)
    ]
    if (
        before["hash"] in hashes or len(set(hashes)) == 2
    ):  # one that is other each time says nothing
        return None
    return f"{name} has changed since the run was begun: sample {index} is another one"


def _hash(row: Any) -> str:
    told = [(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in named_tensors(row)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
