"""Results of updates: losses as (total, count) with parts, which stay on an accelerator until the
host asks.

To add up losses, or compare them with infinity, takes an accelerator several operators in each
update. So results are only kept, up to fifty of them, and read together.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number, Totalled

NOTHING: tuple[Number, Number] = (0.0, 0)
"""Total and count of a part of the loss that no item of a batch has."""


class Result:
    """The result of an update.

    Attributes:
        total: the sum of the loss over the items of the global batch.
        count: the number of items (samples, tokens, weights).
        size: the samples of the global batch.
    """

    __slots__ = (
        "_parts",
        "_read",
        "_skipped",
        "count",
        "size",
        "total",
    )

    def __init__(
        self,
        total: Number,
        count: Number,
        size: int,
        parts: Mapping[str, tuple[Number, Number]] | None = None,
        *,
        skipped: bool = False,
    ) -> None:
        self.total = total
        self.count = count
        self.size = size
        self._parts = parts or {}
        self._skipped = skipped
        self._read: Loss | None = None

    @property
    def loss(self) -> float:
        """The loss of the global batch; NaN where nothing was counted.

        On an accelerator, asking waits for it.
        """
        return self._loss_on_host().means("")["loss"]

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped (`lockstep.strategies.steps.skipped_updates`).

        On an accelerator, asking may wait for it.
        """
        return self._skipped or self._loss_on_host().count == 0

    @property
    def parts(self) -> dict[str, float]:
        """The mean of each part of a ``lockstep.Loss`` over the global batch.

        On an accelerator, asking waits for it.
        """
        means = self._loss_on_host().means("")
        return {name: means[name] for name in self._parts}

    @property
    def sums(self) -> Loss:
        """Total, count and parts, perhaps on an accelerator."""
        return Loss(self.total, self.count, self._parts)

    def _loss_on_host(self) -> Loss:
        return read([self])[0]

    def __repr__(self) -> str:
        count = self._loss_on_host().count
        return f"Result(loss={self.loss:.6g}, count={count:g}, size={self.size})"


def added(losses: Sequence[Loss], home: torch.device | None = None) -> Loss:
    """Add up losses: totals, counts, and the parts of each name.

    Args:
        losses: any number of them.
        home: the device that sums are moved to; None where all numbers are on one device.
    """
    if len(losses) == 1 and home is None:
        return losses[0]
    totals: dict[str, list[Number]] = {}
    counts: dict[str, list[Number]] = {}
    for loss in losses:
        for name, (total, count) in loss.parts.items():
            totals.setdefault(name, []).append(total)
            counts.setdefault(name, []).append(count)
    parts = {}
    for name, of_name in totals.items():
        parts[name] = (_sum(of_name, home), _sum(counts[name], home))
    total = _sum([loss.total for loss in losses], home)
    count = _sum([loss.count for loss in losses], home)
    return Loss(total, count, parts)


def _sum(values: Sequence[Number], home: torch.device | None) -> Number:
    """Sum numbers; an accelerator gets no operator for a single one. The sum of none is 0.

    One number is moved to ``home`` from each device: a copy between accelerators holds the queues
    of both.
    """
    if home is not None:
        by_place: dict[Any, list[Number]] = {}
        for value in values:
            by_place.setdefault(getattr(value, "device", None), []).append(value)
        sums = [_sum(on_one_device, None) for on_one_device in by_place.values()]
        values = [s.to(home, non_blocking=True) if isinstance(s, Tensor) else s for s in sums]
    return functools.reduce(operator.add, values) if values else 0


def flattened(losses: Sequence[Loss]) -> list[Number]:
    """List all numbers of losses: total and count of each, then those of its parts."""
    numbers: list[Number] = []
    for loss in losses:
        numbers += loss
        for pair in loss.parts.values():
            numbers += pair
    return numbers


def nested(numbers: Iterator[Number], names: Iterable[str]) -> Loss:
    """Make a loss of the next numbers, with parts of these names."""
    total = next(numbers)
    count = next(numbers)
    parts = {}
    for name in names:
        total_of_part = next(numbers)
        parts[name] = (total_of_part, next(numbers))
    return Loss(total, count, parts)


def read(results: Sequence[Result]) -> list[Loss]:
    """Give total, count and parts of each result; those on an accelerator are read together, once."""
    new = [result for result in results if result._read is None]
    unread = flattened([result.sums for result in new])
    numbers = iter(_on_host(unread))
    for result in new:
        result._read = nested(numbers, result._parts)
    return [result._read for result in results if result._read is not None]


def _on_host(values: list[Number]) -> list[float]:
    """Read numbers from accelerators, those of one device and dtype together."""
    waiting: dict[Any, dict[int, Tensor]] = {}
    for place, value in enumerate(values):
        if _is_on_accelerator(value):
            kind = value.device, value.dtype
            of_kind = waiting.setdefault(kind, {})
            of_kind[place] = value.detach().reshape(())
    read_values: list[Any] = list(values)
    for of_kind in waiting.values():
        numbers = torch.stack(list(of_kind.values())).tolist()
        for place, number in zip(of_kind, numbers, strict=True):
            read_values[place] = number
    return list(map(float, read_values))


def _is_on_accelerator(value: Number) -> TypeGuard[Tensor]:
    """Return whether a number is on an accelerator."""
    return isinstance(value, Tensor) and not value.is_cpu


class PartNames:
    """The names of the parts of a loss, which the ranks agree on in the first update.

    Args:
        world: the ranks.
        loss: of the job.

    Attributes:
        known: the names; None before the first update, and where ranks don't meet.
    """

    def __init__(self, world: World, loss: Totalled) -> None:
        self._world = world
        self._loss = loss
        self.known: tuple[str, ...] | None = None

    def of(self, loss: Loss) -> tuple[str, ...]:
        """Give the names of the parts that the loss of any rank had in the first update.

        Raises:
            LossError: ``loss`` has another part, which the other ranks don't have.
        """
        if self.known is None:
            names = list(loss.parts)
            if not self._world.layout.together:
                return tuple(names)
            if not self._loss.is_known:
                # (PyTorch's losses have no parts, on any rank.)
                of_ranks = self._world.gather_objects(names)
                names = list(itertools.chain(*of_ranks))
            self.known = tuple(dict.fromkeys(names))
        new = sorted(set(loss.parts).difference(self.known))
        if new:
            raise LossError(
                f'{self._loss.name}: part "{new[0]}" is new in step {self._world.step}, and no '
                "batch had it before",
                fix="return each part from the first update on, as (0.0, 0) if a batch has no "
                "such item",
            )
        return self.known


class Sums:
    """Adds up total, count and parts of several updates, or batches.

    Args:
        before: the sums of earlier ones.
        then: is called with each loss when it is read.
    """

    def __init__(
        self,
        before: Loss | None = None,
        then: Callable[[Loss], None] | None = None,
    ) -> None:
        self._sums = before or Loss(0.0, 0.0)
        self._then = then
        self._waiting: list[Result] = []

    def add(self, result: Result) -> None:
        """Add one more, unless it was skipped; the host waits for an accelerator once in fifty."""
        if result._skipped:
            return
        self._waiting.append(result)
        is_there = _is_on_accelerator(result.total) or _is_on_accelerator(result.count)
        if len(self._waiting) == 50 or not is_there:
            self.read()

    def read(self) -> Loss:
        """Give the sums so far."""
        for loss in read(self._waiting):
            self._sums = added([self._sums, loss])
            if self._then is not None:
                self._then(loss)
        self._waiting.clear()
        return self._sums
