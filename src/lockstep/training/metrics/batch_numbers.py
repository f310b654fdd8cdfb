"""Numbers of a batch: outputs without a row for each sample, and whether a metric reads some that batches differ in.

Where it multiplies such a number (a mean, how many codes were used) by the samples, that adds up over parts of the
outputs, which all have the number of the whole; over local batches it is averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.launch.world import World
from lockstep.tensors.pytree import each, parts, rebuilt, tensors
from lockstep.tensors.rows import folded, has_rows, part_of
from lockstep.training.metrics.metric_check import as_samples

_LARGEST = 2**20
"""Elements of a tensor up to which it is kept."""


_MOST = 32
"""Batches with other numbers than those before them, of which the numbers are kept."""


class BatchNumbers:
    """Those of some local batches of an evaluation, and a few samples of the first, which metrics are called for."""

    def __init__(self) -> None:
        self._first: tuple[Any, Any] | None = None
        self._samples = 0
        self._back: Callable[[Any], Any] = lambda nest: nest
        self._numbers: list[list[Any]] = []

    def keep(self, outputs: Any, targets: Any) -> None:
        """Keep those of a local batch."""
        outputs, targets, samples, back = next(as_samples(outputs, targets))
        samples = samples or next((len(t) for t in tensors(targets) if t.dim()), 0)
        numbers: list[Any] = []
        if samples and folded((outputs, targets), samples) is None:
            _with_others(outputs, samples, numbers.append)
        numbers = [n.detach().cpu().clone() if isinstance(n, torch.Tensor) else n for n in numbers]
        if not numbers or len(self._numbers) == _MOST or any(_are_alike(numbers, before) for before in self._numbers):
            return
        self._numbers.append(numbers)
        if self._first is None:
            self._samples, self._back = min(4, samples), back
            self._first = each(torch.clone, part_of((outputs, targets), 0, self._samples, samples))

    def read_by(self, functions: Mapping[str, Any], world: World) -> list[str]:
        """The names of metrics that read what differs between batches, on the first rank; every rank calls this."""
        first, *others = [of for numbers in world.gather_objects(self._numbers) for of in numbers] or [[]]
        if self._first is None or not world.is_first:
            return []
        return [name for name, its in functions.items() if any(self._reads(its, first, other) for other in others)]

    def _reads(self, metric: Any, first: list[Any], other: list[Any]) -> bool:
        assert self._first is not None
        outputs, targets = self._first

        def value(its: Iterator[Any]) -> list[torch.Tensor]:
            made = self._back(_with_others(outputs, self._samples, lambda _: next(its)))
            return [torch.as_tensor(number) for number in metric(made, targets)]

        with contextlib.suppress(Exception):  # it can't take them
            return not _are_alike(value(iter(first)), value(iter(other)))
        return False


def _with_others(nest: Any, samples: int, instead: Callable[[Any], Any]) -> Any:
    """Outputs with others for Python's numbers, and for tensors without a row for each sample."""
    if isinstance(nest, torch.Tensor):
        if has_rows(nest, samples) or nest.numel() > _LARGEST:
            return nest
        found = instead(nest)
        return found.to(nest.device) if isinstance(found, torch.Tensor) else nest
    if isinstance(nest, int | float):
        return nest if (found := instead(nest)) is None else found
    inside = parts(nest)
    return nest if inside is None else rebuilt(nest, [_with_others(part, samples, instead) for part in inside])


def _are_alike(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(map(_is_alike, ones, others))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other)
