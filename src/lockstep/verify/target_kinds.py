"""Kinds of batches: those whose targets differ in kind from the batches that are verified anyway.

A mask that is uneven in one batch of the epoch, a class that is rare, a NaN or another mark of what is missing: the
loss may weight such a batch otherwise than all others.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lockstep.data import AnyLoader
from lockstep.tensors.pytree import holds_packed, named_tensors

_MOST = 3
"""Batches that are taken beside."""

_FEW = 32
"""Different whole numbers in a batch, up to which each is looked at."""

Trait = tuple[str, Any, Any]


def others_in_kind(loader: AnyLoader, taken: Collection[int], seconds: float) -> tuple[tuple[int, ...], int]:
    """Batches of the first epoch whose targets have something that those of no other batch taken have.

    Args:
        loader: of ``single``.
        taken: numbers of the batches that are verified anyway.
        seconds: to look at targets for, at most.

    Returns:
        Their numbers, the most different first, and how many batches were looked at.
    """
    began = time.perf_counter()
    found: dict[int, frozenset[Trait]] = {}
    for number, batch in enumerate(loader.epoch(0)):
        found[number] = frozenset().union(*(traits(p.targets, p.size) for p in batch.parts if p.size))
        if time.perf_counter() - began > seconds:
            break
    known = set().union(*(found.get(number, ()) for number in taken))
    chosen: list[int] = []
    while len(chosen) < _MOST:
        best = max(found, key=lambda number: len(found[number] - known))
        if not found[best] - known:
            break
        chosen.append(best)
        known |= found[best]
    return tuple(chosen), len(found)


def traits(targets: Any, size: int) -> frozenset[Trait]:
    """What is to be seen of the targets of ``size`` samples."""
    found: set[Trait] = set()
    for name, tensor in () if holds_packed(targets) else named_tensors(targets):
        if not tensor.dim() or tensor.shape[0] != size or not tensor.numel() or tensor.is_complex():
            continue
        if tensor.is_floating_point():
            missing = tensor.isnan()
            found.add((name, "NaN", _spread(missing)))
            if bool(missing.all()):
                continue
            tensor = tensor.masked_fill(missing, tensor[~missing][0])
        else:
            tensor = tensor.long()
            values = torch.unique(tensor).tolist()
            found.add((name, "negative", values[0] < 0))
            found |= {(name, "value", value) for value in values} if len(values) <= _FEW else set()
        for which, value in zip(("lowest", "highest"), tensor.aminmax(), strict=True):
            found.add((name, which, _spread(tensor == value)))
    return frozenset(found)


def _spread(hits: Tensor) -> str:
    """How something is spread over the samples of a batch."""
    each = hits.reshape(hits.shape[0], -1).sum(1)
    if int(each.sum()) <= 1:
        return "at most once"
    return "evenly" if bool((each == each[0]).all()) else "unevenly"
