"""What a checkpoint holds beside the step's state, and how it is taken up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.checkpoint.folder import load_newest
from lockstep.checkpoint.weights import load_weights, save_weights, weights_on_cpu
from lockstep.checkpoint.writer import Writer
from lockstep.data import is_stream
from lockstep.data.dataset_state import forgets_samples, has_state, load_state, state_of
from lockstep.data.stream import StreamLoader
from lockstep.errors import FolderError, JobError, first_line, nearest
from lockstep.settings import read_best
from lockstep.training.callbacks.dispatch import Callbacks
from lockstep.training.setup import Setup


class Saves:
    """Writes the checkpoints of one training, and takes up the newest; the same on every rank.

    Attributes:
        notes: what a person has to know of what is saved and taken up.
        check: raises what the writing of a checkpoint raised meanwhile.
        finish: waits for the last checkpoint.
        settle: waits for it, whatever comes of it.
    """

    def __init__(self, setup: Setup, callbacks: Callbacks) -> None:
        self._job = setup.job
        self._world = setup.world
        self._folder = setup.folder
        self._step = setup.step
        self._scheduler = setup.scheduler
        self._loader = setup.loader
        self._callbacks = callbacks
        self.notes: list[str] = []

        self._is_stream = is_stream(setup.train_data)
        self._data = self._saveable(setup.train_data)
        if self._data is not None:
            self._loader.keep_states()
        self._data_states: list[Any] | None = None

        self._metric, self._more_is_better = read_best(self._job.best)
        self._best = math.inf  # the best value so far, with a minus where more is better

        self._writer = Writer(self._folder.checkpoints, self._world, self._job.keep)
        self.check = self._writer.check
        self.finish = self._writer.finish
        self.settle = self._writer.settle

    def _saveable(self, train_data: Any) -> Any:
        """Return the training data if they have a state that can be saved, else None."""
        if not has_state(train_data):
            return None

        if self._job.loader_workers != 0 and not self._is_stream:
            self.notes.append(
                "train_data has a state, which loader workers would change: loader_workers=0 "
                "saves it"
            )
            return None

        if forgets_samples(train_data):
            self.notes.append(
                "train_data has a shuffle buffer that is not in its state: a resumed run goes "
                "through it again to its place"
            )
            return None

        return train_data

    # ---- saving ----------------------------------------------------------------------------------

    def _beside(
        self,
        epoch: int,
        position: int,
        *,
        whole: bool = True,
    ) -> dict[str, Any]:
        """Return the states of what is around the step.

        Unless ``whole``, averages have the rows of this rank only.
        """
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "callbacks": self._callbacks.state_dict(whole=whole),
            "train_data": self._data_state(epoch, position),
        }

    def _data_state(self, epoch: int, position: int) -> Any:
        """Return rank 0's state of a stream, which all ranks read; else the state of each rank's data."""
        if self._data is None:
            return None
        state = self._loader.state_at(epoch, position)
        if self._is_stream:
            return state
        return self._world.gather_objects(state_of(self._data) if state is None else state)

    def save(self, progress: Mapping[str, Any], values: Mapping[str, float] | None = None) -> None:
        """Begin to write a checkpoint.

        Args:
            progress: of the training, as plain values.
            values: of an evaluation, which decides whether the weights are the best ones so far;
                None where there was no evaluation.

        Raises:
            SaveError: it, or the one before, can't be written.
        """
        shards = self._step.layout.keeps_shards and self._writer.is_shared
        state = self._step.state_dict(whole=not shards)
        write_best: Callable[[], None] | None = None
        if values is not None and self.is_best(values):
            self._best = self._measured(values)
            write_best = self._best_weights(shards=shards)

        whole = {
            **state,
            **self._beside(progress["epoch"], progress["position"], whole=not shards),
            **progress,
            "best": self._best,
            "best_of": [self._metric, self._more_is_better],
            "seed": self._job.seed,
            "batch_size": self._job.batch_size,
        }
        about = {name: progress[name] for name in ("step", "epoch", "position")}
        self._writer.save(progress["step"], whole, about, write_best)

    def _best_weights(self, *, shards: bool) -> Callable[[], None] | None:
        """Take the weights that were evaluated; gives what writes them on rank 0.

        Ranks that keep shards write them here, together.
        """
        with self._callbacks.evaluating():
            if shards:
                self._step.saved.write_weights(self._folder.best)
                return None
            weights = self._step.saved.weights()
            if not self._world.is_first:
                return None
            return partial(save_weights, self._folder.best, weights_on_cpu(weights))

    def save_best(self, values: Mapping[str, float]) -> None:
        """Write the weights that were evaluated, if they are the best ones so far.

        This is for an evaluation after which no checkpoint is made.
        """
        if not self.is_best(values):
            return

        self._best = self._measured(values)
        self.finish()
        with self._callbacks.evaluating():
            self._step.saved.write_weights(self._folder.best)

    # ---- the best evaluation ---------------------------------------------------------------------

    def refuse_unknown(self, known: Mapping[str, float]) -> None:
        """Refuse a metric that an evaluation, which gave these, doesn't have, before the first step.

        Raises:
            JobError: ``best`` or a callback goes by such a metric.
        """
        self.is_best(known)
        self._callbacks.refuse_unknown(known)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than all before it.

        Raises:
            JobError: it has no such metric.
        """
        return self._measured(values) < self._best

    def _measured(self, values: Mapping[str, float]) -> float:
        """Return a value that is lower for better weights.

        NaN where there are no values of an evaluation.
        """
        value = values.get(self._metric, math.nan)
        if self._metric not in values and "eval_loss" in values:
            raise JobError(
                f'best: there is no "{self._metric}"; {nearest(self._metric, list(values))}'
            )

        return -value if self._more_is_better else value

    # ---- taking up -------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Take up the newest whole checkpoint, and return its content.

        Raises:
            FolderError: there is none.
            InputError: it is of another model, or optimizer.
            JobError: it was made with another seed or batch size.
        """
        checkpoints = self._folder.checkpoints
        state = load_newest(checkpoints, self._world, self.notes.append, self._split)

        for name in ("seed", "batch_size"):
            now = getattr(self._job, name)
            if state[name] != now:
                raise JobError(
                    f"{name}: the run was made with {state[name]}, not {now}: resume it with that"
                )

        self._step.load_state_dict(state)
        best = self._best_in(state) if self._world.is_first else math.inf
        self._best = self._world.broadcast_object(best)
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])

        self._callbacks.load_state_dict(state.get("callbacks", {}))
        self.notes += self._callbacks.notes

        self._data_states = state.get("train_data")
        if self._is_stream and self._data is not None and self._data_states is not None:
            assert isinstance(self._loader, StreamLoader)
            self._loader.begin_at(state["epoch"], state["position"], self._data_states)

        return state

    def _split(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """Return how a tensor is split over the ranks.

        What a callback keeps beside a parameter is split as that parameter.
        """
        return self._step.layout.split(self._callbacks.beside(name), shape)

    def _best_in(self, state: Mapping[str, Any]) -> float:
        """Return the best value of a run that is resumed, on rank 0.

        An evaluation after its last checkpoint counts too.
        """
        best: float = state["best"]
        by = tuple(state.get("best_of", ("eval_loss", False)))
        if by != (self._metric, self._more_is_better):
            return math.inf
        try:
            load_weights(self._folder.best)
        except FolderError as error:
            if not math.isinf(best):
                why = first_line(error)
                self.notes.append(f"{why}: the best weights are looked for anew from here on")
            return math.inf

        for record in self._folder.read_metrics():
            if record["step"] == state["step"] and self._metric in record:
                best = min(best, self._measured(record))

        return best

    def load_data(self) -> None:
        """Give the training data their state back.

        Nothing may read a sample between this and the first step.

        Raises:
            JobError: they don't take it.
        """
        states = self._data_states
        if self._data is None or not states or self._is_stream:
            return

        size = self._world.size
        if len(states) != size:
            self.notes.append(
                f"train_data's state was saved by {len(states)} processes, and these are {size}: "
                "each begins with the state of the first"
            )
            states = states[:1] * size

        load_state(self._data, states[self._world.rank], "train_data")
