"""Calls the callbacks of a training on every rank, and makes sure that the ranks stay alike.

A rank whose callbacks have written a parameter in a step waits until every rank has written the
same (`World.meet`, by the store of the process group). So a write on some ranks only is found in
that step, and where nothing is written, nothing is sent. After steps 1, 2, 4, 8, ..., and between
epochs, ranks compare what else callbacks change: settings of the optimizer, numbers and texts among
the attributes of the model's modules, and writes to ``parameter.data``, which a parameter's version
doesn't show.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lockstep.data import mixed
from lockstep.errors import JobError, RunError, StrategyError, told
from lockstep.job import Job
from lockstep.launch.events import Line
from lockstep.launch.world import END_OF_CALLBACKS
from lockstep.model.hooks import PARAMETER_HOOKS, hooked_parameters, structure_of
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import each
from lockstep.tensors.seeding import seeded
from lockstep.training.callbacks.averages import Average
from lockstep.training.callbacks.callback import Callback, TrainingContext
from lockstep.training.callbacks.stopping import OfMetric

_STREAM = 0xCA11
"""Of the numbers that callbacks draw: another one than any rank's."""


class Callbacks:
    """The callbacks of one training on one rank.

    Args:
        job: whose they are.
        step: the model under its strategy.
        folder: of the run.
        last: called after the person's, and not held to act alike on all ranks; ``on_event``.

    Attributes:
        are_own: whether some are of a class of a person's own.

    Raises:
        JobError: one is no callback, can't be copied, or writes the same file as another.
    """

    def __init__(self, job: Job, step: Step, folder: Path, last: Callback) -> None:
        self._step = step
        self._world = step.world
        self._seed = job.seed
        self._of_ranks = step.world.size > 1
        counts: collections.Counter[str] = collections.Counter()
        memo = _shared_with(job)
        self._by_name: dict[str, Callback] = {}
        for callback in job.callbacks:
            name = type(callback).__name__
            counts[name] += 1
            self._by_name[f"{name}-{counts[name]}" if counts[name] > 1 else name] = _copied(
                callback, memo
            )
        outputs = collections.Counter(
            one.output for one in self._by_name.values() if isinstance(one.output, str)
        )
        if (
            twice := next((output for output, number in outputs.items() if number > 1), None)
        ) is not None:
            raise JobError(
                f"callbacks: {outputs[twice]} of them would write {twice}: leave one, or give "
                "another name"
            )
        # Those that come with Lockstep draw nothing, or under a seed of their own, and add no
        # hooks: 0.2 ms a step.
        self.are_own = step.has_own_callbacks = any(map(_is_own, self._by_name.values()))
        self._last = {"on_event": last}
        self._asks = bool(self._by_name or job.on_event)
        parts = (
            step.parts()
        )  # (what is written to whole parameters of shards is compared where they are cut)
        self._parameters = [
            (name, p) for name, p in step.model.named_parameters() if parts[name] is p
        ]
        self.training = TrainingContext(step, folder, self.evaluating)
        self.by_step = any(_has(callback, "on_step") for callback in self._by_name.values())
        self.notes: list[str] = []
        self._has_begun = False

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Before the first step, refuse a metric that evaluations won't have; a person's own
        callbacks may add some.

        Raises:
            JobError: there is no such metric.
        """
        for callback in () if self.are_own else self._by_name.values():
            if isinstance(callback, OfMetric):
                callback.refuse_unknown(known)

    def call(self, kind: str, epoch: int, metrics: dict[str, float], *, whole: bool = True) -> str:
        """Call the method of that kind of each; gives the name of one that stops the training, or
        "".

        Of an epoch that isn't ``whole``, since the training ends within it, or that was not
        evaluated, ``on_event`` is told only.
        """
        training = self.training
        training.epoch = epoch
        training.metrics = metrics
        training.stopping = None
        within = kind in ("step", "log")
        looks = self.are_own and self._step.cuts_batch
        before = structure_of(self._step.model) if looks else None
        with contextlib.ExitStack() as stack:
            if self._by_name and not within:
                stack.enter_context(self._step.evaluated_weights())
            if self._of_ranks and self._by_name:
                stack.enter_context(self._same_on_every_rank(within))
            if (
                self.are_own
            ):  # updates leave other streams behind on each rank, and with micro-batches
                stack.enter_context(seeded(mixed(self._seed, self._world.step, _STREAM)))
            by = self._each(self._by_name if whole else {}, kind)
        if kind == "start":
            self._note_what_is_gathered()
            self._has_begun = True
        if before is not None and before != structure_of(self._step.model):
            self._refuse_what_replicas_lack()
        if not within:
            last = self._each(self._last, kind)
            by = by or last
        if self._of_ranks and self._asks and not within:
            by = next(filter(None, self._world.gather_objects(by)), None)
        elif self._of_ranks and by is not None and self._step.together:
            self._world.meet(f"the end of the training by {by[0]}")
        if by is not None and by[1] and self._world.is_first:
            self._world.tell(Line(f"{by[0]}: {by[1]}"))
        return "" if by is None else by[0]

    def _refuse_what_replicas_lack(self) -> None:
        """After a callback changed modules, parameters or hooks of the model."""
        if self._step.replicas > 1 and self._world.size == 1:
            raise StrategyError(
                "dp: a callback changes modules, parameters or hooks of the model, which its "
                "replicas don't follow: "
                "do it where the model is built, or take ddp"
            )
        if self._world.is_first and hooked_parameters(self._step.model):
            self._step.tell_once([PARAMETER_HOOKS])

    def _each(self, callbacks: Mapping[str, Callback], kind: str) -> tuple[str, str] | None:
        """Call each; gives the name of one that stops the training, and why."""
        by = None
        for name, callback in callbacks.items():
            with self._parameters_for(callback, f"on_{kind}")():
                getattr(callback, f"on_{kind}")(self.training)
            for metric, value in self.training.metrics.items():
                if not isinstance(value, int | float):
                    self.training.metrics[metric] = _number(value, f"callbacks: {name}: {metric}")
            if by is None and self.training.stopping is not None:
                by = name, self.training.stopping
        return by

    def stepped(self, result: Result, epoch: int) -> str:
        """After an update, as ``call``."""
        self.training.result = result
        return self.call("step", epoch, {})

    def logged(self, epoch: int, values: dict[str, float]) -> str:
        """After a log within an epoch, whose values rank 0 has, as ``call``.

        Where ranks don't meet in their updates, ``on_event`` is told only.
        """
        training = self.training
        meets = self._step.together and self._of_ranks
        if meets and self._by_name:
            values = self._world.broadcast_object(values)
        by = self.call("log", epoch, values) if self._step.together else ""
        training.epoch = epoch
        training.metrics = values
        training.stopping = None
        last = self._each(self._last, "logged")
        by = by or (last[0] if last is not None else "")
        if not (meets and self._asks):
            return by
        return next(filter(None, self._world.gather_objects(by)), "")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """With the weights in place that are evaluated; the later callbacks' win."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._step.evaluated_weights())
            for callback in self._by_name.values():
                found = callback.evaluating(self.training)
                stack.enter_context(_Within(self._parameters_for(callback, "evaluating"), found))
            yield

    def _parameters_for(
        self, callback: Callback, method: str
    ) -> Callable[[], AbstractContextManager[None]]:
        """Gives the context in which a method is called: whole parameters for a person's that
        needs them.
        """
        needs = _is_persons(callback, method) and callback.needs_model
        return self._step.whole_parameters if needs else self._step.own_parameters

    def _note_what_is_gathered(self) -> None:
        for name, callback in self._by_name.items() if self._step.keeps_shards else ():
            if _is_persons(callback, "on_step") and callback.needs_model:
                text = (
                    "callbacks: every rank gathers the whole model in each update for on_step "
                    f"of {name}"
                )
                self._step.tell_once(
                    [f"{text}: if it needs no parameters, set needs_model = False"]
                )

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """The state of each by its name; of averages this rank's rows, unless ``whole``."""
        states = {
            name: callback.rows()
            if isinstance(callback, Average) and not whole
            else self._state_of(callback)
            for name, callback in {**self._by_name, **self._last}.items()
        }
        return {name: state for name, state in states.items() if state}

    def _state_of(self, callback: Callback) -> dict[str, Any] | None:
        """That of one, whole; None of one that raises before ``on_start``, in which it may make
        what it gives.
        """
        try:
            with self._parameters_for(callback, "state_dict")():
                kept = callback.state_dict()
            state: dict[str, Any] = each(_gathered, kept)
            return state
        except Exception:
            if self._has_begun:
                raise
            return None

    def beside(self, name: str) -> str:
        """In a checkpoint the name of the parameter beside which a callback keeps this tensor,
        or the tensor's own.
        """
        _, callback, key, *rest = [*name.split("/", 3), "", ""]
        is_average = isinstance(self._by_name.get(callback), Average) and key == "average"
        if is_average and name.startswith("callbacks/"):
            return f"model/{rest[0]}"
        return name

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; callbacks that are new begin anew, which is said."""
        for name, callback in {**self._by_name, **self._last}.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif self._state_of(callback) != {}:
                self.notes.append(f"callbacks: {name} begins anew: the run had none")
        for name in states.keys() - self._by_name.keys() - self._last.keys():
            self.notes.append(
                f"callbacks: the run had {name}, whose state is left out: the job has none now"
            )

    # ---- what they change ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _same_on_every_rank(self, within: bool) -> Iterator[None]:
        """Hold what is changed meanwhile to being the same on every rank.

        Raises:
            InputError, RunError: it isn't, or parameters that ranks share were written.
        """
        together = self._step.together
        looks = not within or (together and is_power_of_two(self._world.step))
        versions, others = self._versions(), self._others() if looks else {}
        yield
        now = self._versions()
        written = [name for name, was in versions.items() if now[name] != was]
        if written and not together:
            raise RunError(
                f'callbacks: parameter "{written[0]}" was written, and all ranks share it, so '
                "that each of them would "
                "write it: take ddp"
            )
        now_is = {name: digest(p) for name, p in self._parameters if name in written}
        changed: dict[str, Any] = {f'parameter "{name}"': its for name, its in now_is.items()}
        after = self._others() if looks else {}
        changed |= {
            f'"{name}"': after.get(name)
            for name in others | after
            if others.get(name) != after.get(name)
        }
        if looks:  # all ranks come here
            self._world.meet(END_OF_CALLBACKS, together=together)
            for rank, theirs in enumerate(every := self._world.gather_objects(changed)):
                if differ := [
                    name for name in every[0] | theirs if every[0].get(name) != theirs.get(name)
                ]:
                    raise RunError(
                        f"callbacks change {differ[0]} on rank 0 and rank {rank} differently: "
                        "what they change must be "
                        "the same on every rank"
                    )
        elif changed:
            print_of = hashlib.sha256(repr(changed).encode()).hexdigest()[
                :8
            ]  # of all, so that ranks compare them
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._world.meet(
                f"what callbacks change ({next(iter(changed))}{more}, {print_of})",
                together=together,
            )
        if looks and within:
            self._step.after_events()

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (p.data_ptr(), p._version) for name, p in self._parameters}

    def _others(self) -> dict[str, Any]:
        """Settings of the optimizer and attributes of the model's modules, as far as these are
        numbers or texts.
        """
        found: dict[str, Any] = {}
        for i, group in enumerate(self._step.optimizer.param_groups):
            for key, value in group.items():
                found[f"{key} of optimizer group {i}"] = value
        for name, module in self._step.model.named_modules(prefix="model"):
            for key, value in vars(module).items():
                found[f"{name}.{key}"] = value
        return {
            name: value for name, value in found.items() if isinstance(value, int | float | str)
        }


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise JobError(f"{what} is a {type(value).__name__}, and a metric is a number") from error


def _shared_with(job: Job) -> dict[Any, Any]:
    """A memo of ``copy.deepcopy`` by which callbacks share the loss, the datasets and other
    fields of the job.
    """
    fields = [value for name, value in vars(job).items() if name != "callbacks"]
    sets = [each for value in fields if isinstance(value, Mapping) for each in value.values()]
    return {id(value): value for value in (*fields, *sets)}


def _copied(callback: Any, memo: dict[Any, Any]) -> Callback:
    """A callback of this run's own, with the objects that the job holds too, and copies that
    other callbacks have.
    """
    if not isinstance(callback, Callback):
        kind = (
            f"the class {callback.__name__}"
            if isinstance(callback, type)
            else f"a {type(callback).__name__}"
        )
        raise JobError(f"callbacks: objects of lockstep.Callback are expected, not {kind}")
    try:
        return copy.deepcopy(callback, memo)
    except Exception as error:
        name = type(callback).__name__
        raise JobError(
            f"callbacks: {name} can't be copied ({told(error)}): open files in on_start"
        ) from error


def _is_own(callback: Callback) -> bool:
    """Whether it is of a class of a person's own, not one that comes with Lockstep, or has
    methods of theirs.
    """
    given = (hasattr(Callback, name) and callable(value) for name, value in vars(callback).items())
    return not type(callback).__module__.startswith("lockstep.") or any(given)


def _is_persons(callback: Callback, method: str) -> bool:
    """Whether a method of a callback is a person's code."""
    return _is_own(callback) and _has(callback, method)


def _has(callback: Callback, method: str) -> bool:
    """Whether it has a method that does anything."""
    return getattr(getattr(callback, method), "__func__", None) is not getattr(Callback, method)


def _gathered(tensor: Any) -> Any:
    """The whole of a shard; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class _Within:
    """A context that is entered and left within another, which its body isn't in."""

    def __init__(
        self, around: Callable[[], AbstractContextManager[Any]], inner: AbstractContextManager[Any]
    ) -> None:
        self._around, self._inner = around, inner

    def __enter__(self) -> None:
        with self._around():
            self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        with self._around():
            return self._inner.__exit__(*error)
