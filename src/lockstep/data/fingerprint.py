"""Fingerprint: whether data are those that a run was begun with, as far as their number and one sample tell."""

from __future__ import annotations

import hashlib
from typing import Any

from lockstep.data.fetch import Collate, Fetcher
from lockstep.data.shares import Batch
from lockstep.data.source import is_stream
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import cut, holds_packed, named_tensors


def fingerprint(batch: Batch, samples: int | None, collate: Collate | None) -> dict[str, Any]:
    """The number of samples, and a hash of the first one of a batch that was fetched anyway.

    A collate of a person's own may make other rows of a sample in each batch, so then there is no hash.

    Args:
        batch: of this process.
        samples: how many there are in all; None for a stream, of which nothing is kept.
        collate: the job's.
    """
    if samples is None:
        return {}
    shares = batch.shares or [batch.parts]
    part = next((part for share in shares for part in share if part.size), None)
    if collate is not None or part is None or part.samples is None or holds_packed((part.inputs, part.targets)):
        return {"samples": samples}
    row = cut((part.inputs, part.targets), 0, 1, part.size)
    return {"samples": samples, "sample": int(part.samples[0]), "epoch": batch.epoch, "hash": _hash(row)}


def change_of(before: dict[str, Any], dataset: Any, *, seed: int, name: str) -> str | None:
    """What is other than it was, in a line; None where nothing is."""
    if not before or is_stream(dataset):
        return None
    if before["samples"] != len(dataset):
        return (
            f"{name} has {len(dataset):,} samples, and had {before['samples']:,} when the run was begun: its batches "
            "are other ones now"
        )
    if "hash" not in before:
        return None
    index = before["sample"]
    hashes = [_hash(Fetcher(dataset, seed=seed)(before["epoch"], [[index]])[0]) for _ in range(2)]
    if before["hash"] in hashes or len(set(hashes)) == 2:  # one that is other each time says nothing
        return None
    return f"{name} has changed since the run was begun: sample {index} is another one"


def _hash(row: Any) -> str:
    told = [(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in named_tensors(row)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
