"""Whether a metric's pairs of total and count are sums over samples, as those of local batches are added up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from lockstep.launch.world import World
from lockstep.model.losses.additivity import DOUBLED, are_double, is_apart, repeated, with_value, without_rows
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.pytree import (
    both_of,
    each,
    folded,
    has_rows,
    holds_packed,
    part_of,
    parts,
    rebuilt,
    tensors,
    to_device,
)

_MOST = 8
"""Local batches, at most, as which a metric is given one."""

_SOME = 4
"""Samples of a local batch that are put together with those of others."""


class AcrossReplicas:
    """Whether metrics are sums over samples of several local batches, whose targets may be masked differently.

    They are called for some outputs of the first local batch with its own targets, then with those of another.
    """

    def __init__(self) -> None:
        self._outputs: Any = None
        self._back: Callable[[Any], Any] = lambda nest: nest
        self._targets: list[tuple[int, Any]] = []
        self._numbers: list[list[Any]] = []

    def keep(self, outputs: Any, targets: Any) -> None:
        """Keep some samples of a local batch."""
        outputs, targets, samples, back = next(as_samples(outputs, targets))
        numbers: list[Any] = []
        _with_numbers(outputs, samples, numbers.append)
        self._numbers.append(numbers)
        if samples:
            some = min(_SOME, samples)
            outputs, targets = each(torch.clone, part_of((outputs, targets), 0, some, samples))
            if self._outputs is None:
                self._outputs, self._back = outputs, back
            self._targets.append((some, each(torch.Tensor.cpu, targets)))

    def adds_up(self, metric: Any, outputs: Any, targets: Any) -> bool:
        """Whether that for samples of a local batch and as many of the first that was kept is the sum of both."""
        outputs, targets, samples, back = next(as_samples(outputs, targets))
        if not samples or not self._targets:
            return True
        kept, first = self._targets[0]
        some = min(kept, samples)
        place = next((t.device for t in tensors(outputs)), torch.device("cpu"))
        earlier = to_device(part_of((self._outputs, first), 0, some, kept), place)
        both = both_of(part_of((outputs, targets), 0, some, samples), some, earlier, some)
        return both is None or _adds_up(lambda o, t: metric(back(o), t), None, *both, 2 * some)

    def no_sums(self, functions: Mapping[str, Any], world: World) -> list[str]:
        """The names of those that are none, on the first rank."""
        heard = world.gather_objects((self._targets, self._numbers))
        every = to_device([each_one for targets, _ in heard for each_one in targets], world.device.torch)
        if not world.is_first or not every:
            return []
        numbers = [each_one for _, numbers in heard for each_one in numbers]
        outputs, size = self._outputs, every[0][0]
        twice = [both_of((outputs, every[0][1]), size, (outputs, theirs), size) for n, theirs in every[1:] if n == size]

        def is_none(metric: Any) -> bool:
            return not all(
                _adds_up(lambda o, t: metric(self._back(o), t), None, *both, 2 * size) for both in twice if both
            )

        return [name for name, metric in functions.items() if is_none(metric) or self._reads(metric, numbers)]

    def _reads(self, metric: Any, numbers: list[list[Any]]) -> bool:
        """Whether it reads numbers among outputs that are of all samples of a batch, and differ between batches."""
        other = next((of for of in numbers if len(of) == len(numbers[0]) and of != numbers[0]), None)
        if other is None:
            return False
        samples, targets = self._targets[0]

        def value(its: Iterator[Any]) -> Any:
            return metric(self._back(_with_numbers(self._outputs, samples, lambda _: next(its))), targets)

        with contextlib.suppress(Exception):
            return any(
                _float(a) != _float(b) for a, b in zip(*(value(iter(of)) for of in (numbers[0], other)), strict=True)
            )
        return False


def _with_numbers(nest: Any, samples: int, instead: Callable[[Any], Any]) -> Any:
    """Outputs with others for Python's numbers, and for tensors of whole numbers without a row for each sample."""
    if isinstance(nest, torch.Tensor):
        if nest.is_floating_point() or nest.is_complex() or has_rows(nest, samples):
            return nest
        found = instead(nest.tolist())
        return nest if found is None else torch.as_tensor(found, dtype=nest.dtype, device=nest.device)
    if isinstance(nest, int | float):
        return nest if (found := instead(nest)) is None else found
    inside = parts(nest)
    return nest if inside is None else rebuilt(nest, [_with_numbers(part, samples, instead) for part in inside])


def is_sum(metric: Any, whole: tuple[Any, Any] | None, outputs: Any, targets: Any, local_batches: int) -> bool:
    """Whether a metric's pair for all samples is the sum of those for two parts of them.

    And that for so many ``local_batches`` alike so many times as large: the hardest ten may be all of one.
    """
    return any(
        not _reads_uncut(lambda o, t, back=back: metric(back(o), t), theirs, targets, samples)
        and _adds_up(lambda o, t, back=back: metric(back(o), t), whole, theirs, targets, samples, local_batches)
        for theirs, targets, samples, back in as_samples(outputs, targets)
    )


def _reads_uncut(metric: Any, outputs: Any, targets: Any, samples: int) -> bool:
    """Whether it reads an output without a row for each sample, a mean over the batch: parts would have the same."""
    uncut = [t for t in without_rows((outputs, ()), samples, ()) if t.is_floating_point()] if samples else []
    if not uncut:
        return False
    try:
        return any(math.isnan(_float(v)) for v in metric(*with_value((outputs, targets), uncut, math.nan)))
    except Exception:  # it can't take them
        return False


def _adds_up(
    metric: Any, whole: tuple[Any, Any] | None, outputs: Any, targets: Any, samples: int, local_batches: int = 1
) -> bool:
    if not samples:
        return True
    try:
        if samples == 1:  # too few to cut: twice as many
            halved = each(lambda t: t / 2 if t.is_floating_point() else t, outputs)
            both = both_of((outputs, targets), 1, (halved, targets), 1)
            if both is None:
                return True
            (outputs, targets), samples = both, 2
            whole = None
        whole = metric(outputs, targets) if whole is None else whole
        half = samples // 2
        parts = [
            metric(*part_of((outputs, targets), start, n, samples)) for start, n in ((0, half), (half, samples - half))
        ]
        sums = [[_float(part[i]) for part in parts] for i in (0, 1)]
        many = repeated((outputs, targets), samples, min(local_batches, _MOST))
        of_many = whole if many is None else metric(*many)
        is_double = are_double([whole[0], *(part[0] for part in parts)])
    except Exception:  # of fewer samples, or more, it can't be computed
        return False
    tolerance = 1e-2 if any(t.dtype in HALF for t in tensors(outputs)) else DOUBLED if is_double else 1e-4
    times = 1 if many is None else min(local_batches, _MOST)
    sums += [[_float(one), _float(one) * (times - 1)] for one in whole]
    return not any(
        is_apart(_float(a), *of, tolerance=tolerance) for a, of in zip((*whole, *of_many), sums, strict=True)
    )


def _float(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def as_samples(outputs: Any, targets: Any) -> Iterator[tuple[Any, Any, int, Callable[[Any], Any]]]:
    """Outputs and targets with a row for each sample, their number, and what makes such outputs what they were.

    Of some models outputs are (time, batch, ...). Where they may be either, both are given.
    """
    samples = _samples_of(outputs, targets)
    of_targets = next((len(t) for t in tensors(targets) if t.dim()), 0)
    swaps = [samples > 0 and t.dim() > 1 and t.shape[1] == of_targets for t in tensors(outputs)]

    def swapped(nest: Any) -> Any:
        each_swaps = iter(swaps)
        return each(lambda t: t.transpose(0, 1) if next(each_swaps) else t, nest)

    if samples == of_targets or not any(swaps):
        yield outputs, targets, samples, lambda nest: nest
    if any(swaps):
        yield swapped(outputs), targets, of_targets, swapped


def _samples_of(outputs: Any, targets: Any) -> int:
    """How many samples they are of; 0 where they can't be cut."""
    if holds_packed((outputs, targets)):
        return 0
    if isinstance(outputs, list) and (
        all(isinstance(one, MutableMapping) for one in outputs) or not any(True for _ in tensors(outputs))
    ):
        return len(outputs)  # a dictionary for each image, as detectors give; texts
    of_outputs, of_targets = (next((len(t) for t in tensors(of) if t.dim()), 0) for of in (outputs, targets))
    several = of_targets and folded((outputs, targets), of_targets) is not None  # rows for each sample
    return of_targets if several else of_outputs
