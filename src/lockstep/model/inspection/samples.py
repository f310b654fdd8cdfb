"""Samples that a model is inspected with: those of a batch, fewer, or more that are made of
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from lockstep.tensors.pytree import each, tensors
from lockstep.tensors.rows import cut, has_rows

FEWEST = 4
"""Samples that are looked at, at least."""


def enough(
    batch: tuple[Any, Any], samples: int, *, again: bool
) -> Iterator[tuple[tuple[Any, Any], int]]:
    """Samples that can be cut: those of the batch, then, if they are few, as many again, and
    again, that differ.
    """
    if samples > 1:
        yield (
            (cut(batch, 0, FEWEST, samples), FEWEST)
            if again and samples > FEWEST
            else (batch, samples)
        )
    if samples < FEWEST:
        yield as_many(batch, samples, FEWEST), FEWEST


def as_many(batch: tuple[Any, Any], samples: int, wanted: int) -> tuple[Any, Any]:
    """So many samples, made of fewer."""
    times = -(-wanted // samples)
    more = each(functools.partial(_multiplied, samples, times), batch)
    made: tuple[Any, Any] = cut(more, 0, wanted, samples * times)
    return made


def is_ragged(inputs: Any, samples: int) -> bool:
    """Whether nothing can be cut, or integers of all samples are in one row (words, say, beside
    their offsets).
    """
    shapes, of_one = (
        [t.shape for t in tensors(some)] for some in (inputs, cut(inputs, 0, 1, samples))
    )
    is_whole = bool(shapes) or hasattr(
        inputs, "__dict__"
    )  # an object of a person's own, of graphs say
    return (is_whole and samples > 1 and shapes == of_one) or any(
        t.dim() == 1 and len(t) != samples and not t.is_floating_point() for t in tensors(inputs)
    )


def _multiplied(samples: int, times: int, tensor: torch.Tensor) -> torch.Tensor:
    if not has_rows(tensor, samples):
        return tensor
    return torch.cat(
        [tensor / i if tensor.is_floating_point() else tensor for i in range(1, times + 1)]
    )
