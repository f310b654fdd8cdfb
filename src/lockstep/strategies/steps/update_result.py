"""What updates did: their losses as (total, count) with parts, which stay on an accelerator until
the host asks.

An accelerator that added up losses, or compared them with infinity, in each update would be given
several operators for that. So results are only kept, up to fifty of them, and read together.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.model.losses.loss import Loss, Number


class Result:
    """What an update did.

    Attributes:
        total: the sum of the loss over the items of the global batch.
        count: their number (samples, tokens, weights).
        size: the samples of the global batch.
    """

    __slots__ = ("_parts", "_read", "_skipped", "count", "size", "total")

    def __init__(
        self,
        total: Number,
        count: Number,
        size: int,
        parts: Mapping[str, tuple[Number, Number]] | None = None,
    ) -> None:
        self.total = total
        self.count = count
        self.size = size
        self._parts = parts or {}
        self._skipped = False
        self._read: Loss | None = None

    @property
    def loss(self) -> float:
        """The loss of the global batch; NaN where nothing was counted. On an accelerator, asking
        waits for it.
        """
        return read([self])[0].means("")["loss"]

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped (`lockstep.strategies.steps.skipped_updates`).

        On an accelerator, asking may wait for it.
        """
        return self._skipped or read([self])[0].count == 0

    @property
    def parts(self) -> dict[str, float]:
        """The mean of each part of a ``lockstep.Loss`` over the global batch, likewise."""
        means = read([self])[0].means("")
        return {name: means[name] for name in self._parts}

    @property
    def sums(self) -> Loss:
        """Total, count and parts, as they are: perhaps on an accelerator."""
        return Loss(self.total, self.count, self._parts)

    def __repr__(self) -> str:
        return f"Result(loss={self.loss:.6g}, count={read([self])[0].count:g}, size={self.size})"


def summed(values: Sequence[Number]) -> Number:
    """Their sum; 0 of none, and of one itself, so that an accelerator gets no operator for it."""
    return functools.reduce(operator.add, values) if values else 0


def added(losses: Sequence[Loss], how: Callable[[list[Number]], Number] = summed) -> Loss:
    """Several losses as one: totals, counts and parts are summed, as far as they have them."""
    parts: dict[str, list[tuple[Number, Number]]] = {}
    for loss in losses:
        for name, pair in loss.parts.items():
            parts.setdefault(name, []).append(pair)
    sums = {
        name: (how([t for t, _ in pairs]), how([c for _, c in pairs]))
        for name, pairs in parts.items()
    }
    return Loss(how([loss.total for loss in losses]), how([loss.count for loss in losses]), sums)


def flattened(losses: Sequence[Loss]) -> list[Number]:
    """All their numbers: total and count, then those of the parts."""
    return [number for loss in losses for pair in (loss, *loss.parts.values()) for number in pair]


def nested(numbers: Iterator[Number], names: Iterable[str]) -> Loss:
    """The loss of which the next numbers are, its parts having these names."""
    return Loss(
        next(numbers), next(numbers), {name: (next(numbers), next(numbers)) for name in names}
    )


def read(results: Sequence[Result]) -> list[Loss]:
    """Total, count and parts of each, which are read from an accelerator once, and together."""
    new = [result for result in results if result._read is None]
    numbers = iter(_on_host(flattened([result.sums for result in new])))
    for result in new:
        result._read = nested(numbers, result._parts)
    return [result._read for result in results if result._read is not None]


def _on_host(values: list[Number]) -> list[float]:
    waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in values:
        if (there := _there(value)) is not None:
            waiting.setdefault((there.device, there.dtype), []).append(there.detach().reshape(()))
    read = {kind: iter(torch.stack(numbers).tolist()) for kind, numbers in waiting.items()}
    return [
        float(v if (there := _there(v)) is None else next(read[there.device, there.dtype]))
        for v in values
    ]


def _there(value: Number) -> Tensor | None:
    """It, where it is on an accelerator."""
    return value if isinstance(value, Tensor) and not value.is_cpu else None


@functools.lru_cache(maxsize=64)
def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device, where it is written only once. It mustn't be changed."""
    return torch.full((), value, dtype=dtype, device=device)


_LEAST_COUNT = 1e-30
"""What an accelerator takes for a count of 0 until the host has read it."""


def as_tensor(values: Iterable[Number], device: torch.device) -> Tensor:
    """Numbers and scalars as one tensor of float64; an accelerator isn't waited for."""
    each = [
        value if isinstance(value, Tensor) else scalar(value, torch.float64, device)
        for value in values
    ]
    return torch.stack([value.to(device, torch.float64) for value in each])


def backward_factor(total: Tensor, divisor: Number, *, waits: bool) -> Tensor:
    """What the backward of ``total / divisor`` begins with, at ``total``.

    Autograd begins with it, which saves a small step two operators and a node of the graph.

    Args:
        total: of a loss.
        divisor: a number of samples or items.
        waits: whether the host may wait for the divisor's value.
    """
    if isinstance(divisor, Tensor) and not waits:
        return quotient(1.0, divisor.to(total.device, non_blocking=True), total).to(total.dtype)
    return scalar(1.0 / float(divisor) if divisor else 0.0, total.dtype, total.device)


def quotient(number: float, count: Tensor, like: Tensor | None) -> Tensor:
    """``number / count``, in float64 if ``like`` is, else in float32, on the count's device.

    A count of 0 is an error that `Step.check` raises. Until then it must not spoil the parameters:
    the gradients of a total over nothing are 0, and are so still after they were multiplied by
    this.
    """
    wide = torch.float64 if like is not None and like.dtype == torch.float64 else torch.float32
    least = count.clamp_min(_LEAST_COUNT if count.is_floating_point() else 1)
    return (scalar(number, wide, count.device) / least).to(wide)


def _of_items(loss: Loss) -> Loss:
    """It, where the total over no item is 0, also where it is a mean of none, NaN, times 0."""

    def of(total: Number, count: Number) -> tuple[Number, Number]:
        return (0.0 if not count and math.isnan(total) else total), count

    return Loss(*of(loss.total, loss.count), {name: of(*pair) for name, pair in loss.parts.items()})


class Sums:
    """Total, count and parts of several updates, or batches, together.

    Args:
        before: those of others before them.
        then: is called with each, when it is read.
    """

    def __init__(
        self, before: Loss | None = None, then: Callable[[Loss], None] | None = None
    ) -> None:
        self._sums = before or Loss(0.0, 0.0)
        self._then = then
        self._waiting: list[Result] = []

    def add(self, result: Result) -> None:
        """Add one more, unless it was skipped; an accelerator isn't waited for, but for fifty
        results together.
        """
        if result._skipped:
            return
        self._waiting.append(result)
        if len(self._waiting) == 50 or _there(result.total) is _there(result.count) is None:
            self.read()

    def read(self) -> Loss:
        """The sums so far."""
        for loss in map(_of_items, read(self._waiting)):
            self._sums = added([self._sums, loss])
            if self._then is not None:
                self._then(loss)
        self._waiting.clear()
        return self._sums
