"""Reports what happens in a training, on rank 0: to the records, TensorBoard, the display, and the
job's ``on_event`` functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.data.dataset_state import has_state
from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.events import Event
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World
from lockstep.training.callbacks.callback import Callback, TrainingContext


class EventReporter(Callback):
    """Reports each event after the other callbacks were called.

    Raises:
        JobError: TensorBoard isn't installed, or a function gives something else than None or
            ``"stop"``.
    """

    def __init__(self, world: World, job: Job, folder: RunFolder) -> None:
        self._folder = folder
        self._functions: list[Any] = list(job.on_event) if world.is_first else []
        self._tensorboard = job.tensorboard and world.is_first
        self._writer: Any = None

    def on_start(self, training: TrainingContext) -> None:
        """Open TensorBoard's file, and report ``"started"``."""
        if self._tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise JobError(
                    "tensorboard: it isn't installed: pip install torch-lockstep[tensorboard]"
                ) from error
            purge_step = training.step + 1 if training.step else None
            self._writer = SummaryWriter(str(training.folder), purge_step=purge_step)
        self._report("started", training)

    def on_logged(self, training: TrainingContext) -> None:
        """Write the record of a log within an epoch, and report ``"logged"``."""
        if training.world.is_first:
            record = {"epoch": training.epoch, "step": training.step, **training.metrics}
            self._folder.add_metrics(record)
        self._write(training)
        self._report("logged", training)

    def on_epoch(self, training: TrainingContext) -> None:
        """Report ``"epoch"``."""
        self._report("epoch", training)

    def on_evaluated(self, training: TrainingContext) -> None:
        """Report ``"evaluated"``."""
        self._write(training)
        self._report("evaluated", training)

    def on_saved(self, training: TrainingContext) -> None:
        """Report ``"saved"``."""
        self._report("saved", training)

    def on_finish(self, training: TrainingContext) -> None:
        """Report ``"finished"``."""
        self._report("finished", training)

    def _write(self, training: TrainingContext) -> None:
        if self._writer is None:
            return
        for name, value in training.metrics.items():
            self._writer.add_scalar(name, value, training.step)

    def _report(self, kind: Any, training: TrainingContext) -> None:
        if not training.world.is_first:
            return
        metrics = dict(training.metrics)
        event = Event(kind, training.epoch, training.step, metrics, str(training.folder))
        training.world.tell(event)
        for function in self._functions:
            answer = function(event)
            if answer == "stop":
                training.stop()
            elif answer is not None:
                raise JobError(
                    f'on_event: a function returned {answer!r}: return None, or "stop" to end '
                    "the training"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the functions that have one, in their order."""
        states = [
            function.state_dict() if has_state(function) else None for function in self._functions
        ]
        return {"functions": states} if any(state is not None for state in states) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each function the state that it had."""
        for function, saved in zip(self._functions, state["functions"], strict=False):
            if saved is not None and has_state(function):
                function.load_state_dict(saved)

    def close(self) -> None:
        """Write out what TensorBoard hasn't written yet."""
        if self._writer is not None:
            self._writer.close()
