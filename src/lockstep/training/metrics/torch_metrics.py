"""Metrics of torchmetrics: updated on each rank, and merged as torchmetrics merges them over a
process group.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError
from lockstep.launch.world import World
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import each, holds_packed, tensors
from lockstep.tensors.rows import folded, part_of


def is_torchmetric(metric: Any) -> bool:
    """Whether it is a torchmetrics Metric, without importing torchmetrics."""
    return any(
        kind.__module__.startswith("torchmetrics.") and kind.__name__ == "Metric"
        for kind in type(metric).__mro__
    )


def fresh(metric: Any, device: torch.device) -> Any:
    """A copy that has seen nothing."""
    mine = copy.deepcopy(metric)
    # Merging is done here, over ranks and replicas alike; torchmetrics must not sum over the
    # process group once more.
    for one in _each_metric(mine):
        one.sync_on_compute = one._to_sync = False
    mine.reset()
    return mine.to(device)


def value_over(metric: Any, world: World) -> dict[str, float]:
    """The value over all ranks, under ""; those of a metric with several under "/0", "/1", ... or
    their own names.

    Raises:
        JobError: it gives something else than numbers.
    """
    value = merged(metric.cpu(), world.gather_objects(states_of(metric.cpu()))).compute()
    named = _named(value)
    try:
        return {below: float(v) for below, v in named.items()}
    except (TypeError, ValueError) as error:
        name = type(metric).__name__
        raise JobError(
            f"metrics: {name} gave {type(value).__name__}, numbers (one, or a row of them) are "
            "expected"
        ) from error


def states_of(metric: Any) -> list[tuple[dict[str, Any], int]]:
    """What it has seen, and in how many updates; so of each metric that it is made of."""
    return [
        ({name: getattr(one, name) for name in one._reductions}, one._update_count)
        for one in _each_metric(metric)
    ]


def merged(metric: Any, every: list[list[tuple[dict[str, Any], int]]]) -> Any:
    """A metric of which several have seen samples each, which now has seen all of them.

    States are reduced as ``torchmetrics.Metric`` does over a process group.
    """
    for one, *of_each in zip(_each_metric(metric), *every, strict=True) if len(every) > 1 else ():
        for name, reduction in one._reductions.items():
            states = [held[name] for held, _ in of_each]
            state: Any = (
                _in_order(of_each, name) if isinstance(states[0], list) else torch.stack(states)
            )
            is_none = isinstance(state, list) and not state
            setattr(one, name, state if reduction is None or is_none else reduction(state))
        one._update_count = sum(updates for _, updates in of_each)
    return metric


def _in_order(of_each: Sequence[tuple[dict[str, Any], int]], name: str) -> list[Any]:
    """All items of lists, by updates, in the order in which one device would have made them."""
    each_update = []
    for held, updates in of_each:
        items, number = held[name], max(updates, 1)
        many, rest = divmod(len(items), number)
        each_update.append(
            [items[i * many : (i + 1) * many] for i in range(number)] if not rest else [items]
        )
    return [
        item
        for of in itertools.zip_longest(*each_update, fillvalue=[])
        for items in of
        for item in items
    ]


def is_of_parts(metric: Any, outputs: Any, targets: Any, replicas: int) -> bool:
    """Whether the value of some samples is that of parts of them, one after the other, and merged.

    Of two, or of three where there are as many replicas. It isn't where a metric keeps means of
    batches, or only those of the last few batches, or guesses from the values whether they are
    probabilities.
    """
    if any(
        kind.__name__ == "Running" for one in _each_metric(metric) for kind in type(one).__mro__
    ):
        return False
    device = place_of((outputs, targets))
    return all(
        _is_of_parts(metric, *of, device, max(2, min(replicas, 3)))
        for of in _as_samples(outputs, targets)
    )


def _is_of_parts(
    metric: Any,
    outputs: Any,
    targets: Any,
    size: int,
    back: Callable[[Any], Any],
    device: torch.device,
    several: int,
) -> bool:
    if size < several:
        return True
    ends = [0]
    while len(ends) < several:
        ends.append(
            ends[-1] + (size - ends[-1] + 2) // 3
        )  # of unequal size: means of means would agree
    spans = itertools.pairwise([*ends, size])
    parts = [part_of((outputs, targets), start, end - start, size) for start, end in spans]
    whole, both, *apart = (fresh(metric, device) for _ in range(2 + several))
    try:
        whole.update(back(outputs), targets)
        for (some, wanted), one in zip(parts, apart, strict=True):
            one.update(back(some), wanted)
            both.update(back(some), wanted)
        values = [
            _named(one.compute())
            for one in (whole, both, merged(apart[0], list(map(states_of, apart))))
        ]
        return not any(_differ(values[0], its) for its in values[1:])
    except Exception:  # of so few samples it can't be computed
        return True


def _as_samples(outputs: Any, targets: Any) -> Iterator[tuple[Any, Any, int, Callable[[Any], Any]]]:
    """Outputs and targets with a row for each sample, their number, and what makes such outputs
    what they were.

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
        all(isinstance(one, MutableMapping) for one in outputs)
        or not any(True for _ in tensors(outputs))
    ):
        return len(outputs)  # a dictionary for each image, as detectors give; texts
    of_outputs, of_targets = (
        next((len(t) for t in tensors(of) if t.dim()), 0) for of in (outputs, targets)
    )
    if any(t.dim() and len(t) == of_targets for t in tensors(outputs)):
        return of_targets
    several = (
        of_targets and folded((outputs, targets), of_targets) is not None
    )  # rows for each sample
    return of_targets if several else of_outputs


def _differ(value: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    one, two = (
        torch.as_tensor([float(v) for v in of.values()], dtype=torch.float64)
        for of in (value, other)
    )
    return not torch.allclose(one, two, rtol=1e-3, atol=1e-4, equal_nan=True)


def _named(value: Any) -> dict[str, Any]:
    """What ``compute`` gave, by what comes after the metric's name."""
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    several = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    return (
        {f"/{key}": one for key, one in several.items()}
        if isinstance(several, Mapping)
        else {"": value}
    )


def _each_metric(metric: nn.Module) -> list[Any]:
    """It, and those that it is made of."""
    return [module for module in metric.modules() if is_torchmetric(module)]
