"""Evaluation: the loss and the metrics over a dataset, each sample counted once, on any number of devices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.data import AnyLoader
from lockstep.errors import JobError
from lockstep.seeding import kept_states
from lockstep.step import Step
from lockstep.world import World


def evaluate_sets(
    step: Step, loaders: Mapping[str, AnyLoader], metrics: Mapping[str, Any], world: World, seed: int
) -> dict[str, float]:
    """The loss and each metric of each set, as ``"clean/loss"``, after the first one's loss as ``"loss"``.

    Args:
        step: the model under its strategy.
        loaders: this rank's shares of each set, by name; a set whose name is "" is the only one, and its metrics have
            their own names.
        metrics: as in ``evaluate``.
        world: who evaluates.
        seed: for models that draw random numbers in evaluation too: the same for a batch in each evaluation.
    """
    if "" in loaders:
        return evaluate(step, loaders[""], metrics, world, seed)
    found = {name: evaluate(step, loader, metrics, world, seed) for name, loader in loaders.items()}
    values = {f"{name}/{metric}": value for name, values in found.items() for metric, value in values.items()}
    return {"loss": next(iter(values.values())), **values}


def evaluate(step: Step, loader: AnyLoader, metrics: Mapping[str, Any], world: World, seed: int) -> dict[str, float]:
    """The mean loss (``"loss"``) and each metric over all samples of the loader; the same values on every rank.

    Args:
        step: the model under its strategy.
        loader: this rank's shares of the evaluation set.
        metrics: by name, functions ``(outputs, targets) -> (total, count)``, or torchmetrics ``Metric`` objects, which
            are updated on each rank and merged on all.
        world: who evaluates.
        seed: gives each batch a random stream of its own.

    Raises:
        JobError: a metric gives something else.
    """
    functions = {name: metric for name, metric in metrics.items() if not _is_torchmetric(metric)}
    objects = {name: _fresh(metric, step) for name, metric in metrics.items() if _is_torchmetric(metric)}
    sums = [[0.0, 0.0] for _ in range(1 + len(functions))]
    with step.evaluating(), kept_states():
        for _, results in step.over(loader.epoch(0), step.results, seed):
            for outputs, targets, total, count in results:
                _add(sums[0], total, count)
                for place, (name, function) in zip(sums[1:], functions.items(), strict=True):
                    _add(place, *_pair(name, function(outputs, targets)))
                for metric in objects.values():
                    metric.update(outputs, targets)
    summed = world.all_reduce(torch.tensor(sums, dtype=torch.float64, device=_summing_device(world))).tolist()
    values = {"loss": summed[0][0] / summed[0][1] if summed[0][1] else float("nan")}
    for name, (total, count) in zip(functions, summed[1:], strict=True):
        values[name] = total / count if count else float("nan")
    found = {"loss": values["loss"]}
    for name in metrics:
        if name in objects:
            found |= {name + below: value for below, value in _merged(objects[name], world).items()}
        else:
            found[name] = values[name]
    return found


def tried(metrics: Mapping[str, Any], outputs: Any, targets: Any) -> None:
    """Try the metrics that are functions on outputs of training, so that a wrong one isn't found an epoch later.

    What one raises is passed over: it may be meant for outputs of evaluation only.

    Raises:
        JobError: one gives something other than a total and a count.
    """
    for name, function in metrics.items():
        if _is_torchmetric(function):
            continue
        try:
            with torch.no_grad():
                value = function(outputs, targets)
        except Exception:
            continue
        _pair(name, value)


def _summing_device(world: World) -> torch.device:
    return torch.device("cpu") if world.backend in (None, "gloo") else world.device.torch


def _add(sums: list[float], total: Any, count: Any) -> None:
    sums[0] += float(total)
    sums[1] += float(count)


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r}"
        raise JobError(
            f'metrics: "{name}" gave {what}; a pair (total, count) is expected: the sum over items, their number'
        )
    for part in value:
        if isinstance(part, torch.Tensor) and part.numel() != 1:
            raise JobError(
                f'metrics: "{name}" gave a tensor of shape {tuple(part.shape)} in (total, count), not a number: '
                "sum it over the samples"
            )
        if not isinstance(part, torch.Tensor) and not hasattr(part, "__float__"):
            raise JobError(f'metrics: "{name}" gave {part!r} in (total, count), not a number')
    return value


def _is_torchmetric(metric: Any) -> bool:
    """Whether it is a torchmetrics Metric, without importing torchmetrics."""
    return any(
        kind.__module__.startswith("torchmetrics.") and kind.__name__ == "Metric" for kind in type(metric).__mro__
    )


def _fresh(metric: Any, step: Step) -> Any:
    mine = copy.deepcopy(metric)
    # Merging is done here, over ranks and replicas alike; torchmetrics must not sum over the process group once more.
    mine.sync_on_compute = False
    mine.reset()
    return mine.to(step.world.device.torch)


def _merged(metric: Any, world: World) -> dict[str, float]:
    """The value over all ranks, under ""; those of a metric with several under "/0", "/1", ... or their own names."""
    every = world.gather_objects(metric.cpu())
    for other in every[1:]:
        every[0].merge_state(other)
    value = every[0].compute()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    named = (
        {f"/{key}": v for key, v in value.items()}
        if isinstance(value, Mapping)
        else {f"/{i}": v for i, v in enumerate(value)}
        if isinstance(value, list | tuple)
        else {"": value}
    )
    try:
        return {below: float(v) for below, v in named.items()}
    except (TypeError, ValueError) as error:
        name = type(metric).__name__
        raise JobError(
            f"metrics: {name} gave {type(value).__name__}, numbers (one, or a row of them) are expected"
        ) from error
