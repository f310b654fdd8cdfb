"""A job's metrics in one evaluation: functions, whose totals are added up, and those of
torchmetrics, merged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.data import Batch
from lockstep.errors import JobError, LockstepError, error_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.strategies.steps.update_result import Result, Sums, added
from lockstep.tensors.pytree import versions
from lockstep.training.metrics.torch_metrics import fresh, is_torchmetric, value_over


class JobMetrics:
    """The metrics of one evaluation on this rank, by name."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._names = list(metrics)
        self._functions = functions_of(metrics)
        self._sums = {name: Sums() for name in self._functions}
        self._objects = {}
        for name, metric in metrics.items():
            if name not in self._functions:
                self._objects[name] = fresh(metric, device)

    def add(
        self,
        batch: Batch,
        outputs: Any,
        targets: Any,
    ) -> None:
        """Call, or update, each with a local batch of an evaluation batch.

        Raises:
            JobError: one raises, gives something else than a total and a count, or writes to what
                it is given.
        """
        for name, function in self._functions.items():
            before = versions((outputs, targets))
            value = _called(name, function, outputs, targets)
            if versions((outputs, targets)) != before:
                raise JobError(
                    f'metrics: "{name}" writes to the outputs or targets that it is given, and '
                    "others read them too: let it write to a clone"
                )
            self._sums[name].add(Result(*value, batch.size))

        for name, metric in self._objects.items():
            with _naming(name):
                metric.update(outputs, targets)

    @property
    def functions(self) -> list[Any]:
        """Return the metrics that are functions, or objects that are called."""
        return list(self._functions.values())

    def totals(self, outputs: Any, targets: Any) -> dict[str, tuple[Any, Any]]:
        """Return total and count of each function for some samples."""
        found = {}
        for name, function in self._functions.items():
            found[name] = _called(name, function, outputs, targets)
        return found

    def values(self, world: World) -> dict[str, float]:
        """Return each metric over all ranks; every rank calls this.

        Raises:
            JobError: one of torchmetrics gives something else than numbers.
        """
        of_functions = {name: sums.read() for name, sums in self._sums.items()}
        mine = Loss(0.0, 0.0, of_functions)
        means = added(world.gather_objects(mine)).means("")

        found: dict[str, float] = {}
        for name in self._names:
            if name in self._sums:
                found[name] = means[name]
                continue
            with _naming(name):
                values = value_over(self._objects[name], world)
            for below, value in values.items():
                found[name + below] = value

        return found


def functions_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that are functions, not metrics of torchmetrics."""
    return {name: metric for name, metric in metrics.items() if not is_torchmetric(metric)}


def _called(
    name: str,
    function: Any,
    outputs: Any,
    targets: Any,
) -> tuple[Any, Any]:
    """Call a function, and return its total and count.

    Raises:
        JobError: it raises, or gives something else.
    """
    with _naming(name):
        value = function(outputs, targets)

    return _pair(name, value)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the metric whose error it is."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise JobError(f'metrics: "{name}" raised {error_line(error)}') from error


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return a metric's value, if it is a total and a count.

    Raises:
        JobError: it is something else.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        text = f'metrics: "{name}" gave {_described(value)}; a pair (total, count) is expected: '
        text += "the sum over items, their number"
        if isinstance(value, Mapping):
            text += "; give each of several a name in metrics"
        raise JobError(text)

    for number in value:
        text = f'metrics: "{name}" gave {_described(number)} in (total, count), not a number'
        if isinstance(number, torch.Tensor) and number.numel() != 1:
            raise JobError(f"{text}: sum it over the samples")
        if not hasattr(number, "__float__"):
            raise JobError(text)

    return value


def _described(value: Any) -> str:
    """Return a value in words, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)
