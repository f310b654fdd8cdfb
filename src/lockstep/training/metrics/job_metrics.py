"""A job's metrics in one evaluation: functions, whose totals are added up, and those of
torchmetrics, merged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.data import Batch
from lockstep.errors import JobError, LockstepError, told
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, Sums
from lockstep.tensors.pytree import copied_nest, versions
from lockstep.training.metrics.torch_metrics import fresh, is_of_parts, is_torchmetric, value_over

_OF_PARTS = (
    'metric "{}" gives other values for parts of a batch, merged, than for all of it (it keeps '
    "means of batches, say, "
    "or those of the last ones only, or guesses what outputs are from their values): they depend "
    "on the number of "
    "devices"
)


class JobMetrics:
    """The metrics of one evaluation on this rank.

    Args:
        metrics: by name.
        step: the model under its strategy.
        checks: whether metrics of torchmetrics are compared with what they give for parts of a
            batch.
    """

    def __init__(self, metrics: Mapping[str, Any], step: Step, *, checks: bool) -> None:
        self._names = list(metrics)
        self._step = step
        self._checks = checks
        self._functions = functions_of(metrics)
        self._objects = {
            name: fresh(metric, step.world.device.torch)
            for name, metric in metrics.items()
            if name not in self._functions
        }
        self._sums = {name: Sums() for name in self._functions}
        self._of_parts = set[str]()

    def add(self, batch: Batch, outputs: Any, targets: Any) -> None:
        """Call, or update, each with a local batch of an evaluation batch.

        Raises:
            JobError: one raises, or gives something else than a total and a count, or writes to
                what it is given.
        """
        for name, function in self._functions.items():
            before = versions((outputs, targets))
            value = _called(name, function, outputs, targets)
            if versions((outputs, targets)) != before:
                raise JobError(
                    f'metrics: "{name}" writes to the outputs or targets that it is given, and '
                    "others read them too: "
                    "let it write to a clone"
                )
            self._sums[name].add(Result(*value, batch.size))
        compares = self._checks and is_power_of_two(batch.index + 1)
        for name, metric in self._objects.items():
            with naming(name):
                if compares and not is_of_parts(metric, outputs, targets, self._step.replicas):
                    self._of_parts.add(name)
                metric.update(outputs, targets)

    def totals(self, outputs: Any, targets: Any) -> dict[str, tuple[Any, Any]]:
        """Total and count of each function for some samples."""
        return {
            name: _called(name, function, outputs, targets)
            for name, function in self._functions.items()
        }

    def sums(self) -> list[tuple[float, float, float]]:
        """Total and count of each function on this rank, and 0.

        Of each metric of torchmetrics only the third number is used: 1 where it gives other values
        for parts.
        """
        of_functions = [(*its.read(), 0.0) for its in self._sums.values()]
        return of_functions + [(0.0, 0.0, float(name in self._of_parts)) for name in self._objects]

    def values(self, summed: Sequence[Sequence[float]], world: World) -> dict[str, float]:
        """Each metric, given the sums of ``sums`` over all ranks; every rank calls this.

        Raises:
            JobError: one of torchmetrics gives something else than numbers.
        """
        named = dict(zip((*self._functions, *self._objects), summed, strict=True))
        found: dict[str, float] = {}
        for name in self._names:
            total, count, differs = named[name]
            if name in self._functions:
                found[name] = total / count if count else math.nan
                continue
            if differs and world.is_first:
                self._step.tell_once([_OF_PARTS.format(name)])
            with naming(name):
                for below, value in value_over(self._objects[name], world).items():
                    found[name + below] = value
        return found


def functions_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are functions, not metrics of torchmetrics."""
    return {name: metric for name, metric in metrics.items() if not is_torchmetric(metric)}


def _called(name: str, function: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Total and count.

    Raises:
        JobError: it raises, or gives something else.
    """
    with naming(name):
        return _pair(
            name, function(copied_nest(outputs), copied_nest(targets))
        )  # in which it may keep something


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Say whose error it is."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise JobError(f'metrics: "{name}" raised {told(error)}') from error


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        what = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"{value!r}"
        )
        several = "; give each of several a name in metrics" if isinstance(value, Mapping) else ""
        raise JobError(
            f'metrics: "{name}" gave {what}; a pair (total, count) is expected: the sum over '
            "items, their "
            f"number{several}"
        )
    for part in value:
        if isinstance(part, torch.Tensor) and part.numel() != 1:
            raise JobError(
                f'metrics: "{name}" gave a tensor of shape {tuple(part.shape)} in (total, count), '
                "not a number: "
                "sum it over the samples"
            )
        if not isinstance(part, torch.Tensor) and not hasattr(part, "__float__"):
            raise JobError(f'metrics: "{name}" gave {part!r} in (total, count), not a number')
    return value
