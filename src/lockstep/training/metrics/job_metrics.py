"""A job's metrics in one evaluation: functions, whose totals are added up, and those of torchmetrics, merged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.data import Batch
from lockstep.errors import JobError, LockstepError, told
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.inspection import attribute_prints
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.new_values import NewValues
from lockstep.model.losses.uncut_outputs import holds_numbers
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, Sums
from lockstep.tensors.pytree import copied_nest, each, named_tensors, versions
from lockstep.tensors.rows import with_sample_lists
from lockstep.training.metrics.batch_numbers import BatchNumbers
from lockstep.training.metrics.metric_check import AcrossReplicas, as_samples, is_sum
from lockstep.training.metrics.metric_state import MetricState
from lockstep.training.metrics.torch_metrics import fresh, is_of_parts, is_torchmetric, value_over

_READS = 'metric "{}" uses the model, which keeps something of its local batch in attributes: each replica has its own'

_CANT_TELL = (
    'whether metric "{}" is a sum over samples can\'t be checked: targets hold a number of the whole batch, which '
    "parts of it are given as it is"
)

_REMEMBERS = (
    'metric "{}" remembers something from call to call, and is called for each local batch, not once a batch: where '
    "its value depends on that, it differs from that of one device"
)

_OF_PARTS = (
    'metric "{}" gives other values for parts of a batch, merged, than for all of it (it keeps means of batches, say, '
    "or those of the last ones only, or guesses what outputs are from their values): they depend on the number of "
    "devices"
)


class JobMetrics:
    """They, on this rank.

    Args:
        metrics: by name.
        step: the model under its strategy.
        looks: whether to say what of them depends on the number of devices.

    Attributes:
        functions: those that are no metrics of torchmetrics.
        state: what these hold.
    """

    def __init__(self, metrics: Mapping[str, Any], step: Step, *, looks: bool) -> None:
        self._names, self._step, self._looks = list(metrics), step, looks
        self.functions = functions_of(metrics)
        self._objects = {n: fresh(m, step.world.device.torch) for n, m in metrics.items() if n not in self.functions}
        self.state = MetricState(self.functions)
        self._sums = {name: Sums() for name in self.functions}
        self._no_sums, self._of_parts, self._new = set[str](), set[str](), NewValues()
        self._holds_numbers, self._lists = False, dict[str, bool]()
        says = looks and step.replicas > 1
        self._across = AcrossReplicas() if says and self.functions else None
        self._numbers = BatchNumbers() if looks and self.functions else None
        self._says = says and step.world.is_first
        self._readers = self._using_the_model() if self._says else []
        self._kept = attribute_prints(step.model) if self._readers else {}

    def _using_the_model(self) -> list[str]:
        ours = {id(module) for module in self._step.model.modules()}
        return [name for name in self.functions if ours & self.state.reached_by(name).keys()]

    def add(self, batch: Batch, outputs: Any, targets: Any) -> None:
        """Call, or update, each with a local batch of an evaluation batch.

        Raises:
            JobError: one raises, or gives something else than a total and a count, or writes to what it is given.
        """
        is_due = is_power_of_two(batch.index + 1)
        if self._readers and is_due and attribute_prints(self._step.model) != self._kept:
            self._step.tell_once(map(_READS.format, self._readers))
        checks = bool(self.functions) and (self._looks or is_due)  # (the first time each batch: few may be masked)
        known, is_whole = self._kept_for_checks(outputs, targets, is_due=is_due) if checks else (None, False)
        for name, function in self.functions.items():
            before, says = versions((outputs, targets)), self._says and not batch.index
            remembered = self.state.of(name) if says else None
            value = called(name, function, outputs, targets)
            if says and self.state.of(name) != remembered:
                self._step.tell_once([_REMEMBERS.format(name)])
            if versions((outputs, targets)) != before:
                raise JobError(
                    f'metrics: "{name}" writes to the outputs or targets that it is given, and others read them too: '
                    "let it write to a clone"
                )
            self._sums[name].add(Result(*value, batch.size))
            if checks and not self._adds_up(name, value if is_whole else None, known, targets):
                self._no_sums.add(name)
        compares = bool(self._objects) and self._looks and (self._is_new(outputs, targets) or is_due)
        for name, metric in self._objects.items():
            with naming(name):
                if compares and not is_of_parts(metric, outputs, targets, self._step.replicas):
                    self._of_parts.add(name)
                metric.update(outputs, targets)

    def _is_new(self, outputs: Any, targets: Any) -> bool:
        return self._new.add(outputs, targets, next(as_samples(outputs, targets))[2])

    def _kept_for_checks(self, outputs: Any, targets: Any, *, is_due: bool) -> tuple[Any, bool]:
        """Keep what checks of several local batches need; gives outputs as checks take them, and whether all is in."""
        samples = next(as_samples(outputs, targets))[2]
        self._holds_numbers |= holds_numbers(targets, samples)
        held = self._with_known(outputs)
        known = with_sample_lists(held, samples, self._lists)
        if self._across is not None and is_due:
            self._across.keep(known, targets)
        is_waited_for = self._step.world.device.torch.type != "cpu"
        if self._numbers is not None and (is_due or not is_waited_for):
            self._numbers.keep(known, targets)
        return known, held is outputs

    def _with_known(self, outputs: Any) -> Any:
        """With outputs that the model was seen to compute over all samples as parameters, which aren't cut.

        Of sums and means of samples it is known from parts of a batch whether metrics make a sum of them.
        """
        kinds = self._step.eval_check.of_batch
        known = {id(tensor): kinds[name] for name, tensor in named_tensors(outputs) if name in kinds}

        def shown(tensor: torch.Tensor) -> torch.Tensor:
            if (kind := known.get(id(tensor))) is None:
                return tensor
            is_seen = kind in ("sum", "mean", "mean of items")
            return torch.nn.Parameter(torch.zeros_like(tensor) if is_seen else tensor.detach(), requires_grad=False)

        return each(shown, outputs) if known else outputs

    def _adds_up(self, name: str, value: tuple[Any, Any] | None, outputs: Any, targets: Any) -> bool:
        if f"metric {name}" in self._step.eval_check.bent:
            return False
        function = self.functions[name]
        with self.state.kept():
            return is_sum(function, value, outputs, targets, self._step.replicas) and (
                self._across is None or self._across.adds_up(function, outputs, targets)
            )

    def sums(self, world: World) -> list[tuple[float, float, float]]:
        """Total and count of each function on this rank, and 1 where it is seen to be no sum; every rank calls this.

        Of each metric of torchmetrics there is only whether it gives other values for parts.
        """
        with self.state.kept():
            if self._across is not None:
                self._no_sums.update(self._across.no_sums(self.functions, world))
            if self._numbers is not None:
                self._no_sums.update(self._numbers.read_by(self.functions, world))
        of_functions = [(*its.read(), float(name in self._no_sums)) for name, its in self._sums.items()]
        return of_functions + [(0.0, 0.0, float(name in self._of_parts)) for name in self._objects]

    def values(self, summed: Sequence[Sequence[float]], world: World) -> dict[str, float]:
        """Each metric, given the sums of ``sums`` over all ranks; every rank calls this.

        Raises:
            JobError: one of torchmetrics gives something else than numbers.
        """
        named = dict(zip((*self.functions, *self._objects), summed, strict=True))
        self._say_no_sums(name for name in self.functions if named[name][2])
        of_parts = [_OF_PARTS.format(name) for name in self._objects if named[name][2]]
        self._step.tell_once(of_parts if self._step.world.is_first else [])
        means = (total / count if count else math.nan for total, count, _ in summed[: len(self.functions)])
        of_functions, found = dict(zip(self.functions, means, strict=True)), {}
        for name in self._names:
            if name in of_functions:
                found[name] = of_functions[name]
                continue
            with naming(name):
                found |= {name + below: value for below, value in value_over(self._objects[name], world).items()}
        return found

    def _say_no_sums(self, names: Iterable[str]) -> None:
        of = "batches" if self._step.replicas == 1 else "local batches"
        for name in names if self._step.world.is_first else ():
            if self._holds_numbers:
                self._step.tell_once([_CANT_TELL.format(name)] if self._step.replicas > 1 else [])
                continue
            said = f'metric "{name}" is no sum over samples: its values for the {of} are averaged'
            self._step.tell_once([f"{said}; a metric of torchmetrics sees all samples together"])


def functions_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are functions, not metrics of torchmetrics."""
    return {name: metric for name, metric in metrics.items() if not is_torchmetric(metric)}


def called(name: str, function: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Total and count.

    Raises:
        JobError: it raises, or gives something else.
    """
    with naming(name):
        return _pair(name, function(copied_nest(outputs), copied_nest(targets)))  # in which it may keep something


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
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r}"
        several = "; give each of several a name in metrics" if isinstance(value, Mapping) else ""
        raise JobError(
            f'metrics: "{name}" gave {what}; a pair (total, count) is expected: the sum over items, their '
            f"number{several}"
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
