"""Calls the callbacks of a training on every rank.

Each call has the same order on every rank: the job's callbacks in their order, under one random
stream, with the weights that are evaluated; then ``on_event`` on rank 0. What callbacks write on one
rank only is found where the ranks compare their parameters (`Step.after_events`).
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data import mixed
from lockstep.errors import JobError, error_line, nearest
from lockstep.job import Job
from lockstep.run.events import Line
from lockstep.settings import read_best
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result
from lockstep.tensors.pytree import each
from lockstep.tensors.seeding import seeded
from lockstep.training.callbacks.averages import Average
from lockstep.training.callbacks.callback import Callback, TrainingContext
from lockstep.training.callbacks.event_reporter import EventReporter
from lockstep.training.callbacks.stopping import EarlyStopping

_STREAM = 0xCA11
"""The random stream of callbacks: another one than any rank's."""

_ON_EVENT = "on_event"
"""What the job's functions are called beside the callbacks' names."""


class Callbacks:
    """The callbacks of one training on one rank.

    Args:
        job: whose callbacks they are.
        step: the model under its strategy.
        folder: of the run.
        reporter: reports to ``on_event``, after the callbacks were called.

    Attributes:
        are_own: whether some are of a person's own class.
        by_step: whether some are called after each update.
        notes: what a person has to know of the states that were taken up.

    Raises:
        JobError: one is no callback, can't be copied, has a method that nothing calls, or writes
            the same file as another; or a setting goes by evaluations that there are not.
    """

    def __init__(
        self,
        job: Job,
        step: Step,
        folder: Path,
        reporter: EventReporter,
    ) -> None:
        self._step = step
        self._world = step.world
        self._seed = job.seed

        self._by_name = _copies_by_name(job)

        # Lockstep's own callbacks draw nothing, or under a seed of their own, and add no hooks.
        self.are_own = any(map(_is_own, self._by_name.values()))
        step.has_own_callbacks = self.are_own
        if job.eval_data is None and not self.are_own:  # which may evaluate by themselves
            _refuse_evaluations(job)
        self._reporter = reporter
        self._may_stop = bool(self._by_name or job.on_event)

        self.training = TrainingContext(step, folder, self.evaluating, reporter.writer)
        self.by_step = any(_has(callback, "on_step") for callback in self._by_name.values())
        self.notes: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Refuse a metric that evaluations won't have, before the first step.

        A person's own callbacks may add metrics, so with them nothing is refused.

        Raises:
            JobError: there is no such metric.
        """
        if self.are_own:
            return

        for callback in self._by_name.values():
            if isinstance(callback, EarlyStopping):
                callback.refuse_unknown(known)

    # ---- calls -----------------------------------------------------------------------------------

    def call(
        self,
        kind: str,
        epoch: int,
        metrics: dict[str, float],
        *,
        whole: bool = True,
    ) -> str:
        """Call the method ``on_<kind>`` of each callback.

        Args:
            kind: of the method.
            epoch: its number, from 1.
            metrics: what is known by then.
            whole: False for an epoch that was cut off, or not evaluated: then only ``on_event`` is
                called.

        Returns:
            the name of the callback that stops the training, or "".
        """
        self.training._begin_call(epoch, metrics)
        within_epoch = kind in ("step", "log")

        stop: _Stop | None = None
        with contextlib.ExitStack() as stack:
            if self._by_name and not within_epoch:
                stack.enter_context(self._step.modes.evaluating())
            if self.are_own:
                # Updates leave other random streams behind on each rank, and with micro-batches.
                stack.enter_context(seeded(mixed(self._seed, self._world.step, _STREAM)))
            if whole:
                stop = self._each(kind)

        if not within_epoch:
            stop_by_event = self._report(kind)
            stop = self._of_first_rank(stop or stop_by_event)
        elif stop is not None and self._step.together:
            self._world.meet(f"the end of the training by {stop.by}")

        if stop is None:
            return ""
        if stop.why and self._world.is_first:
            self._world.emit(Line(f"{stop.by}: {stop.why}"))
        return stop.by

    def stepped(self, result: Result, epoch: int) -> str:
        """Call ``on_step`` after an update, as ``call``."""
        self.training.result = result
        return self.call("step", epoch, {})

    def logged(self, epoch: int, values: dict[str, float]) -> str:
        """Call ``on_log`` after a log within an epoch, whose values rank 0 has, as ``call``.

        Where ranks don't meet in their updates, only ``on_event`` is called.
        """
        stopped_by = ""
        together = self._step.together
        if together and self._by_name:
            values = self._world.broadcast_object(values)
        if together:
            stopped_by = self.call("log", epoch, values)

        self.training._begin_call(epoch, values)
        stop = self._report("logged")
        if together:
            stop = self._of_first_rank(stop)
        return stopped_by or ("" if stop is None else stop.by)

    def _each(self, kind: str) -> _Stop | None:
        """Call each; return the first stop of the training."""
        stop: _Stop | None = None
        training = self.training
        method = f"on_{kind}"

        for name, callback in self._by_name.items():
            with self._parameters_for(callback, method):
                getattr(callback, method)(training)
            for metric, value in training.metrics.items():
                training.metrics[metric] = float(value)
            if stop is None and training.stopping is not None:
                stop = _Stop(name, training.stopping)

        return stop

    def _report(self, kind: str) -> _Stop | None:
        """Report to ``on_event``; return the stop of the training by one of its functions."""
        self._reporter.report(kind, self.training)
        why = self.training.stopping
        return None if why is None else _Stop(_ON_EVENT, why)

    def _of_first_rank(self, stop: _Stop | None) -> _Stop | None:
        """Return the stop of the first rank that has one, on every rank."""
        if not self._may_stop:
            return stop
        stops = self._world.gather_objects(stop)
        return next((stop for stop in stops if stop is not None), None)

    def values_of(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate with the weights that callbacks put in place.

        Where an average asks for it, the model's own weights are evaluated too: ``raw/eval_loss``.

        Args:
            evaluate: gives the values, by name.
        """
        with self.evaluating():
            values = evaluate()
        averages = [one for one in self._by_name.values() if isinstance(one, Average)]
        if any(average.raw for average in averages):
            with self._step.modes.evaluating():
                raw = evaluate()
            for name, value in raw.items():
                values[f"raw/{name}"] = value
        return values

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights in place that are evaluated; those of later callbacks win."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._step.modes.evaluating())
            for callback in self._by_name.values():
                stack.enter_context(self._with_weights_of(callback))
            yield

    @contextlib.contextmanager
    def _with_weights_of(self, callback: Callback) -> Iterator[None]:
        """Enter and leave what a callback puts around an evaluation, each time with the parameters
        that the callback needs; the evaluation itself has this rank's own.
        """
        weights = contextlib.ExitStack()
        with self._parameters_for(callback, "evaluating"):
            weights.enter_context(callback.evaluating(self.training))
        try:
            yield
        finally:
            with self._parameters_for(callback, "evaluating"):
                weights.close()

    def _parameters_for(self, callback: Callback, method: str) -> AbstractContextManager[None]:
        """Return the context in which a method is called: a person's own has whole parameters if it
        needs them.
        """
        if callback.needs_model and _is_own(callback) and _has(callback, method):
            return self._step.whole_parameters()
        return self._step.layout.own()

    # ---- states ----------------------------------------------------------------------------------

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the state of each by its name; of averages this rank's rows, unless ``whole``."""
        states: dict[str, Any] = {}
        for name, callback in self._by_name.items():
            if isinstance(callback, Average) and not whole:
                state = callback.rows()
            else:
                with self._parameters_for(callback, "state_dict"):
                    state = each(_gathered, callback.state_dict())
            if state:
                states[name] = state

        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; callbacks that are new begin anew."""
        for name, callback in self._by_name.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif _has(callback, "state_dict"):
                self.notes.append(
                    f"callbacks: {name} begins without a state, since the run has none"
                )

        for name in states.keys() - self._by_name.keys() - {_ON_EVENT}:
            self.notes.append(
                f"callbacks: the saved state of {name} is ignored, since the job no longer has it"
            )

    def beside(self, name: str) -> str:
        """In a checkpoint the name of the parameter beside which a callback keeps this tensor, or
        the tensor's own.
        """
        words = name.split("/", 3)
        if len(words) < 4:
            return name
        room, callback, key, parameter = words
        is_average = isinstance(self._by_name.get(callback), Average)
        if is_average and room == "callbacks" and key == "average":
            return f"model/{parameter}"
        return name


class _Stop(NamedTuple):
    """The end of a training by a callback."""

    by: str
    why: str


def _copies_by_name(job: Job) -> dict[str, Callback]:
    """Copies of a job's callbacks for one training, by their classes' names: ``EMA``, ``EMA-2``.

    The copies share with the job the objects that it holds too, and with one another what several
    callbacks hold.
    """
    memo: dict[Any, Any] = {}
    for field, value in vars(job).items():
        if field == "callbacks":
            continue
        memo[id(value)] = value
        if isinstance(value, Mapping):
            memo.update((id(one), one) for one in value.values())

    copies: dict[str, Callback] = {}
    counts: Counter[str] = Counter()
    outputs: set[str | None] = set()

    for callback in job.callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            kind = f"a {name}"
            if isinstance(callback, type):
                kind = f"the class {callback.__name__}"
            raise JobError(f"callbacks: objects of lockstep.Callback are expected, not {kind}")

        _refuse_unknown_methods(type(callback))
        counts[name] += 1
        number = counts[name]
        try:
            made = copy.deepcopy(callback, memo)
        except Exception as error:
            raise JobError(
                f"callbacks: {name} can't be copied ({error_line(error)}): open files in on_start"
            ) from error
        if number > 1:
            name += f"-{number}"
        if made.output is not None and made.output in outputs:
            raise JobError(
                f"callbacks: several would write {made.output}: keep one, or give another name"
            )
        outputs.add(made.output)
        copies[name] = made

    return copies


def _refuse_unknown_methods(kind: type[Callback]) -> None:
    """Refuse a method ``on_...`` that nothing would call.

    Raises:
        JobError: with the nearest name of those that are called.
    """
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in known:
            meant = nearest(name.replace("_train_", "_"), known)
            raise JobError(f"callbacks: {kind.__name__}.{name} would never be called; {meant}")


def _refuse_evaluations(job: Job) -> None:
    """Refuse settings that go by evaluations, for a job without evaluation data.

    Raises:
        JobError: with the setting.
    """
    metric, _ = read_best(job.best)
    if job.best is not None and not metric.startswith("train_"):
        raise JobError(
            f'best: "{metric}" comes from evaluations, and the job has no eval_data: give '
            'eval_data, or take "train_loss:min"'
        )
    for name in ("eval_every", "eval_at_start", "eval_batches"):
        if getattr(job, name):
            raise JobError(
                f"{name}: the job has no eval_data to evaluate: give eval_data, or leave {name} out"
            )


def _is_own(callback: Callback) -> bool:
    """Return whether a callback is of a person's own class, or was given methods of their own."""
    if not type(callback).__module__.startswith("lockstep."):
        return True
    return any(
        callable(value) and hasattr(Callback, name) for name, value in vars(callback).items()
    )


def _has(callback: Callback, method: str) -> bool:
    """Return whether a callback has a method that does anything."""
    function = getattr(getattr(callback, method), "__func__", None)
    return function is not getattr(Callback, method)


def _gathered(tensor: Any) -> Any:
    """Return the whole of a shard; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
