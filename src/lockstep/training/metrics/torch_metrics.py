"""Metrics of torchmetrics: updated on each rank, and merged as torchmetrics merges them over a
process group.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.launch.world import World

State = tuple[dict[str, Any], int]
"""The states of a metric by name, and the number of its updates."""


def is_torchmetric(metric: Any) -> bool:
    """Return whether this is a torchmetrics Metric, without importing torchmetrics."""
    return any(
        kind.__module__.startswith("torchmetrics.") and kind.__name__ == "Metric"
        for kind in type(metric).__mro__
    )


def fresh(metric: Any, device: torch.device) -> Any:
    """Return a copy that was never updated."""
    mine = copy.deepcopy(metric)
    # Merging is done here, over ranks and replicas alike; torchmetrics must not sum over the
    # process group once more.
    for one in _each_metric(mine):
        one.sync_on_compute = False
        one._to_sync = False

    mine.reset()
    return mine.to(device)


def value_over(metric: Any, world: World) -> dict[str, float]:
    """Return the value over all ranks, under ""; every rank calls this.

    The values of a metric with several are under "/0", "/1", ... or their own names.
    """
    metric = metric.cpu()
    every = world.gather_objects(_states_of(metric))
    if len(every) > 1:
        _merge(metric, every)
    value = metric.compute()

    return {below: float(number) for below, number in _named(value).items()}


def _states_of(metric: Any) -> list[State]:
    """Return the state of a metric, and of each metric that it is made of."""
    found = []
    for one in _each_metric(metric):
        state = {name: getattr(one, name) for name in one._reductions}
        found.append((state, one._update_count))
    return found


def _merge(metric: Any, every: list[list[State]]) -> None:
    """Put the states of all ranks together in one metric.

    They are reduced as ``torchmetrics.Metric`` does over a process group.
    """
    for one, *of_ranks in zip(_each_metric(metric), *every, strict=True):
        for name, reduction in one._reductions.items():
            setattr(one, name, _reduced(of_ranks, name, reduction))
        one._update_count = sum(updates for _, updates in of_ranks)


def _reduced(of_ranks: Sequence[State], name: str, reduction: Any) -> Any:
    """Return one state of a metric over all ranks; of lists, the items rank by rank."""
    states = [held[name] for held, _ in of_ranks]
    merged: Any
    if isinstance(states[0], list):
        merged = [item for items in states for item in items]
        if not merged:
            return merged
    else:
        merged = torch.stack(states)

    return merged if reduction is None else reduction(merged)


def _named(value: Any) -> dict[str, Any]:
    """Return what ``compute`` gave, by what comes after the metric's name."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {f"/{key}": one for key, one in value.items()}
    return {"": value}


def _each_metric(metric: nn.Module) -> list[Any]:
    """Return the metric, and those that it is made of."""
    return [module for module in metric.modules() if is_torchmetric(module)]
