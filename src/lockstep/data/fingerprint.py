"""Fingerprint: whether data are those that a run was begun with, as far as a few samples tell."""

from __future__ import annotations

import hashlib
from typing import Any

from lockstep.data.fetch import Collate, Fetcher
from lockstep.data.source import is_stream
from lockstep.digest import digest
from lockstep.nesting import each, named_tensors

_SAMPLES = 4


def fingerprint(dataset: Any, *, seed: int, collate: Collate | None) -> dict[str, Any]:
    """The number of samples, and a few of them by index as hashes; of a stream nothing.

    Samples that are other ones each time they are fetched are left out.
    """
    if is_stream(dataset):
        return {}
    count = len(dataset)
    indices = sorted({i * (count - 1) // max(1, _SAMPLES - 1) for i in range(_SAMPLES)})
    fetcher = Fetcher(dataset, seed=seed, collate=collate)
    try:
        one, again = ([_hash(pair) for pair in fetcher(0, [[i] for i in indices])] for _ in range(2))
    except Exception:  # the training says it
        return {"samples": count}
    hashes = {str(i): mine for i, mine, its in zip(indices, one, again, strict=True) if mine == its}
    return {"samples": count, "hashes": hashes}


def changes(before: dict[str, Any], now: dict[str, Any], name: str) -> str | None:
    """What is other than before, in a line; None where nothing is."""
    if not before or not now:
        return None
    if before["samples"] != now["samples"]:
        return (
            f"{name} has {now['samples']:,} samples, and had {before['samples']:,} when the run was begun: the batches "
            "are other ones"
        )
    mine, its = before.get("hashes", {}), now.get("hashes", {})
    other = next((i for i in mine if i in its and mine[i] != its[i]), None)
    return None if other is None else f"{name} has changed since the run was begun: sample {other} is another one"


def _hash(pair: Any) -> str:
    unpacked = each(lambda t: t, pair, on_packed=lambda packed: {"data": packed.data, "sizes": packed.batch_sizes})
    told = [(name, tuple(t.shape), str(t.dtype), digest(t)) for name, t in named_tensors(unpacked)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
