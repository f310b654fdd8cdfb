"""Whether a metric's pairs of total and count are sums over samples, as those of local batches are added up."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from lockstep.launch.world import World
from lockstep.model.losses.additivity import DOUBLED, are_double, is_apart, repeated, with_next
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import each, holds_packed, tensors, to_device
from lockstep.tensors.rows import both_of, folded, part_of

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

    def keep(self, outputs: Any, targets: Any) -> None:
        """Keep some samples of a local batch."""
        outputs, targets, samples, back = next(as_samples(outputs, targets))
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
        earlier = to_device(part_of((self._outputs, first), 0, some, kept), place_of(outputs))
        both = both_of(part_of((outputs, targets), 0, some, samples), some, earlier, some)
        return both is None or _adds_up(lambda o, t: metric(back(o), t), None, *both, 2 * some)

    def no_sums(self, functions: Mapping[str, Any], world: World) -> list[str]:
        """The names of those that are none, on the first rank."""
        every = to_device(list(itertools.chain(*world.gather_objects(self._targets))), world.device.torch)
        if not world.is_first or not every:
            return []
        outputs, size = self._outputs, every[0][0]
        twice = [both_of((outputs, every[0][1]), size, (outputs, theirs), size) for n, theirs in every[1:] if n == size]

        def is_none(metric: Any) -> bool:
            return not all(
                _adds_up(lambda o, t: metric(self._back(o), t), None, *both, 2 * size, unknown=True)
                for both in twice
                if both
            )

        return [name for name, metric in functions.items() if is_none(metric)]


def is_sum(metric: Any, whole: tuple[Any, Any] | None, outputs: Any, targets: Any, local_batches: int) -> bool:
    """Whether a metric's pair for all samples is the sum of those for two parts of them.

    And that for so many ``local_batches`` alike so many times as large: the hardest ten may be all of one.
    """
    return any(
        _adds_up(lambda o, t, back=back: metric(back(o), t), whole, theirs, targets, samples, local_batches)
        for theirs, targets, samples, back in as_samples(outputs, targets)
    )


def _adds_up(
    metric: Any,
    whole: tuple[Any, Any] | None,
    outputs: Any,
    targets: Any,
    samples: int,
    local_batches: int = 1,
    *,
    unknown: bool = False,
) -> bool:
    """Whether sums of that metric hold; ``unknown`` where it raises."""
    if not samples:
        return True
    nest = outputs, targets
    try:
        if samples == 1:  # too few to cut: twice as many
            halved = each(lambda t: t / 2 if t.is_floating_point() else t, outputs)
            both = both_of(nest, 1, (halved, targets), 1)
            if both is None:
                return True
            nest, samples, whole = both, 2, None
        whole = metric(*nest) if whole is None else whole
        half, times = samples // 2, min(local_batches, _MOST)
        sums = [(whole, *(metric(*part_of(nest, *of, samples)) for of in ((0, half), (half, samples - half))))]
        if times > 1 and (many := repeated(nest, samples, times)) is not None:
            sums.append((metric(*many), whole, [n * (times - 1) for n in whole]))
    except Exception:  # of fewer samples, or more, it can't be computed
        return unknown
    if len(sums) > 1 and (turned := with_next(nest, samples)) is not None:
        with contextlib.suppress(Exception):  # it may take outputs with their own targets only
            others, both = turned
            sums.append((metric(*both), whole, metric(*others)))
    is_double = are_double(made[0] for made in sums[0])
    tolerance = 1e-2 if any(t.dtype in HALF for t in tensors(outputs)) else DOUBLED if is_double else 1e-4
    numbers = (map(_float, of) for made in sums for of in zip(*made, strict=True))
    return not any(is_apart(*of, tolerance=tolerance) for of in numbers)


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
    if any(t.dim() and len(t) == of_targets for t in tensors(outputs)):
        return of_targets
    several = of_targets and folded((outputs, targets), of_targets) is not None  # rows for each sample
    return of_targets if several else of_outputs
