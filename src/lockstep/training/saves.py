"""What is in a checkpoint beside the step's state, and how it is taken up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.checkpoint.reading import load_earlier, load_newest
from lockstep.checkpoint.weights import load_weights, save_weights, weights_on_cpu
from lockstep.checkpoint.writer import Writer
from lockstep.data import AnyLoader, is_stream
from lockstep.data.dataset_state import forgets_samples, has_state, load_state, state_of
from lockstep.data.stream import StreamLoader
from lockstep.errors import FolderError, InputError, JobError, first_line, nearest
from lockstep.job import Job, best_of
from lockstep.launch.run_folder import RunFolder
from lockstep.strategies.steps.step import Step
from lockstep.tensors.state_tree import encoded
from lockstep.training.callbacks.dispatch import Callbacks


class Saves:
    """Saves one training, and takes it up; the same on every rank."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        step: Step,
        scheduler: Any,
        train_data: Any,
        loader: AnyLoader,
        callbacks: Callbacks,
    ) -> None:
        world = step.world
        self._job, self._world, self._folder, self._step, self._scheduler = (
            job,
            world,
            folder,
            step,
            scheduler,
        )
        self._loader, self._callbacks = loader, callbacks
        self._data = train_data if has_state(train_data) else None
        self.notes: list[str] = []
        self._is_stream = is_stream(train_data)
        if self._data is not None and job.loader_workers != 0 and not self._is_stream:
            self._data = None
            self.notes.append(
                "train_data has a state, which loader workers would change: loader_workers=0 "
                "saves it"
            )
        if self._data is not None and forgets_samples(train_data):
            self._data = None
            self.notes.append(
                "train_data has a shuffle buffer that is not in its state: a resumed run goes "
                "through it again to its "
                "place"
            )
        if self._data is not None:
            loader.keep_states()
        self._metric, self._more_is_better = best_of(job.best)
        self._best = math.inf  # the value so far, with a minus where more is better
        self._data_states: list[Any] | None = None
        self._writer = Writer(folder.checkpoints, world, job.keep, alike=step.alike)
        self.check = self._writer.check
        self.finish = self._writer.finish
        self.settle = self._writer.settle

    def refuse_unsaveable(self) -> None:
        """Before the first step, refuse what no checkpoint can hold.

        Raises:
            JobError: something is no tensor and no plain value.
        """
        own = {"model": self._step.model.state_dict(), **self._beside({"epoch": 0, "position": 0})}
        if self._is_stream and self._data is not None:
            with contextlib.suppress(Exception):  # it may have none before it is iterated
                own["train_data"] = state_of(self._data)
        try:
            encoded(
                {**own, "optimizer": self._step.optimizer_state(whole=not self._step.keeps_shards)}
            )
        except InputError as error:
            raise JobError(f"saving: {error}") from error

    def _beside(self, place: Mapping[str, Any], *, whole: bool = True) -> dict[str, Any]:
        """The states of what is around the step; those of callbacks are rank 0's, or rows unless
        they are ``whole``.
        """
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "callbacks": self._callbacks.state_dict(whole=whole),
            "train_data": self._data_state(place["epoch"], place["position"]),
        }

    def _data_state(self, epoch: int, position: int) -> Any:
        """Of a stream, which all ranks read, rank 0's; else that of each rank; None where there
        is none.
        """
        if self._data is None:
            return None
        state = self._loader.state_at(epoch, position)
        if self._is_stream:
            return state
        return self._world.gather_objects(state_of(self._data) if state is None else state)

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Before the first step, refuse what goes by a metric that an evaluation, which gave these,
        doesn't have.

        Raises:
            JobError: something does.
        """
        self.is_best(known)
        self._callbacks.refuse_unknown(known)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than all before it.

        Raises:
            JobError: it has no such metric.
        """
        return self._measured(values) < self._best

    def _measured(self, values: Mapping[str, float]) -> float:
        """What is to be small; NaN where there are no values of an evaluation."""
        value = values.get(self._metric, math.nan)
        if self._metric not in values and "eval_loss" in values:
            raise JobError(
                f'best: there is no "{self._metric}"; {nearest(self._metric, list(values))}'
            )
        return -value if self._more_is_better else value

    def save(self, place: Mapping[str, Any], values: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint.

        Args:
            place: where the training is, as plain values; ``step`` and ``epoch`` among them.
            values: of an evaluation, which decides whether the weights are the best ones so far;
                None where none was.

        Raises:
            SaveError: it, or the one before, can't be written.
        """
        shards = self._step.keeps_shards and self._writer.is_shared
        state = self._step.state_dict(whole=not shards)
        before: Callable[[], None] | None = None
        if values is not None and self.is_best(values):
            self._best = self._measured(values)
            with self._callbacks.evaluating():  # the weights that the loss is of
                if shards:
                    self._step.write_weights(self._folder.best)
                else:  # (anew: it may have put other tensors in the place of those in the state)
                    weights = self._step.weights_for_file()
                    if self._world.is_first:
                        before = partial(save_weights, self._folder.best, weights_on_cpu(weights))
        whole = {
            **state,
            **self._beside(place, whole=not shards),
            **place,
            "best": self._best,
            "best_of": [self._metric, self._more_is_better],
            "seed": self._job.seed,
            "batch_size": self._job.batch_size,
        }
        about = {name: place[name] for name in ("step", "epoch", "position")}
        self._writer.save(place["step"], whole, about, before)

    def save_best(self, values: Mapping[str, float]) -> None:
        """Write the weights of an evaluation after which no checkpoint is made, if they are the
        best ones so far.
        """
        if self.is_best(values):
            self._best = self._measured(values)
            self.finish()
            with self._callbacks.evaluating():
                self._step.write_weights(self._folder.best)

    def load(self) -> dict[str, Any]:
        """Take up the newest whole checkpoint; gives its place.

        Raises:
            FolderError: there is none.
            InputError: it is of another model, or optimizer.
            JobError: it was made with another seed or batch size.
        """
        if self._folder.earlier_state.is_file() and not self._folder.checkpoints.is_dir():
            state = load_earlier(self._folder.earlier_state)
        else:
            state = load_newest(
                self._folder.checkpoints, self._world, self.notes.append, self._split
            )
        for name in ("seed", "batch_size"):
            if state[name] != getattr(self._job, name):
                raise JobError(
                    f"{name}: the run was made with {state[name]}, not "
                    f"{getattr(self._job, name)}: resume it with that"
                )
        self._step.load_state_dict(state)
        best: float = self._world.broadcast_object(
            self._best_in(state) if self._world.is_first else math.inf
        )
        self._best = best
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        earlier = (
            {"on_event": {"functions": state["on_event"]}} if state.get("on_event") else {}
        )  # earlier versions
        self._callbacks.load_state_dict({**earlier, **state.get("callbacks", {})})
        self.notes += self._callbacks.notes
        self._data_states = state.get("train_data")
        if self._is_stream and self._data is not None and self._data_states is not None:
            assert isinstance(self._loader, StreamLoader)
            self._loader.begin_at(state["epoch"], state["position"], self._data_states)
        return state

    def _split(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """As ``Step.split``; of what callbacks keep beside a parameter, as of that."""
        return self._step.split(self._callbacks.beside(name), shape)

    def _best_in(self, state: Mapping[str, Any]) -> float:
        """The best value of a run that is taken up, its evaluation after that checkpoint
        included; on rank 0.
        """
        if not self._has_best(state):
            return math.inf
        records = self._folder.read_metrics() if self._folder.best.is_file() else []
        last = [of for of in records if of["step"] == state["step"] and self._metric in of]
        before: float = state["best"]
        return min([before, *map(self._measured, last)])

    def _has_best(self, state: Mapping[str, Any]) -> bool:
        """Whether the best weights so far are there as they were written, and were chosen by the
        same metric.
        """
        if math.isinf(state["best"]):
            return True
        name, more = state.get("best_of", ("eval_loss", False))
        if (name, more) != (self._metric, self._more_is_better):
            was, now = (
                f"{n}:{'max' if m else 'min'}"
                for n, m in ((name, more), (self._metric, self._more_is_better))
            )
            self.notes.append(
                f"best: it was {was} and is {now}: the best weights are looked for anew from here "
                "on"
            )
            return False
        try:
            load_weights(self._folder.best)
        except FolderError as error:
            why = (
                first_line(error)
                if self._folder.best.is_file()
                else f"{self._folder.best} isn't there any more"
            )
            self.notes.append(f"{why}: the best weights are looked for anew from here on")
            return False
        return True

    def load_data(self) -> None:
        """Give the training data their state back; nothing may look at a sample between this and
        the first step.

        Raises:
            JobError: they don't take it.
        """
        states = self._data_states
        if self._data is None or not states or self._is_stream:
            return
        if len(states) != self._world.size:
            self.notes.append(
                f"train_data's state was saved by {len(states)} processes, and these are "
                f"{self._world.size}: each "
                "begins with that of the first"
            )
            states = states[:1] * self._world.size
        load_state(self._data, states[self._world.rank], "train_data")
