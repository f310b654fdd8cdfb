"""What updates did: their losses as (total, count), which stay on an accelerator until the host asks.

An accelerator that added up losses, or compared them with infinity, in each update would be given several operators for
that. So results are only kept, up to fifty of them, and read together.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.model.loss import Number


class Result:
    """What an update did.

    Attributes:
        total: the sum of the loss over the items of the global batch.
        count: their number (samples, tokens, weights).
        size: the samples of the global batch.
    """

    __slots__ = ("_read", "count", "size", "total")

    def __init__(self, total: Number, count: Number, size: int) -> None:
        self.total = total
        self.count = count
        self.size = size
        self._read: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """The loss of the global batch; NaN where nothing was counted. On an accelerator, asking waits for it."""
        ((total, count),) = read([self])
        return total / count if count else math.nan

    def __repr__(self) -> str:
        ((_, count),) = read([self])
        return f"Result(loss={self.loss:.6g}, count={count:g}, size={self.size})"


def summed(values: Sequence[Number]) -> Number:
    """Their sum; 0 of none, and of one itself, so that an accelerator gets no operator for it."""
    return functools.reduce(operator.add, values) if values else 0


def read(results: Sequence[Result]) -> list[tuple[float, float]]:
    """Total and count of each, which are read from an accelerator once, and together."""
    new = [result for result in results if result._read is None]
    pairs = zip(_on_host([r.total for r in new]), _on_host([r.count for r in new]), strict=True)
    for result, pair in zip(new, pairs, strict=True):
        result._read = pair
    return [result._read for result in results if result._read is not None]


def _on_host(values: list[Number]) -> list[float]:
    waiting: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if (there := _there(value)) is not None:
            waiting.setdefault(there.device, []).append(there.detach().reshape(()))
    read = {device: iter(torch.stack(numbers).tolist()) for device, numbers in waiting.items()}
    return [float(value if (there := _there(value)) is None else next(read[there.device])) for value in values]


def _there(value: Number) -> Tensor | None:
    """It, where it is on an accelerator."""
    return value if isinstance(value, Tensor) and not value.is_cpu else None


@functools.lru_cache(maxsize=64)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device, where it is written only once. It mustn't be changed."""
    return torch.full((), value, dtype=dtype, device=device)


class Sums:
    """Total and count of several updates, or batches, together.

    Args:
        total: of those before.
        count: likewise.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self._total, self._count = total, count
        self._waiting: list[Result] = []

    def add(self, result: Result) -> None:
        """Add one more; an accelerator isn't waited for, but for fifty results together."""
        self._waiting.append(result)
        if len(self._waiting) == 50 or _there(result.total) is _there(result.count) is None:
            self.read()

    def read(self) -> tuple[float, float]:
        """The sums so far."""
        for total, count in read(self._waiting):
            self._total += total
            self._count += count
        self._waiting.clear()
        return self._total, self._count
