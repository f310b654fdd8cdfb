"""Reports what happens in a training, on rank 0: to the records, TensorBoard, the display, and the
job's ``on_event`` functions.
"""

from __future__ import annotations

from typing import Any

from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.world import World
from lockstep.run.events import Event
from lockstep.run.run_folder import RunFolder
from lockstep.training.callbacks.callback import TrainingContext

_KINDS: dict[str, Any] = {
    "start": "started",
    "logged": "logged",
    "epoch": "epoch",
    "evaluated": "evaluated",
    "saved": "saved",
    "finish": "finished",
}
"""The events, by the names of the calls of callbacks that they follow."""


class EventReporter:
    """Reports each event after the callbacks were called.

    Args:
        world: this rank's; only rank 0 reports.
        job: has the functions.
        folder: of the run.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        folder: RunFolder,
    ) -> None:
        self._is_first = world.is_first
        self._folder = folder
        self._functions: list[Any] = list(job.on_event) if world.is_first else []
        self._tensorboard = job.tensorboard
        self._writer: Any = None

    def report(self, call: str, training: TrainingContext) -> None:
        """Report what callbacks were called for; any of the functions may stop the training.

        Raises:
            JobError: TensorBoard isn't installed, or a function returns something else than None or
                ``"stop"``.
        """
        if not self._is_first or call not in _KINDS:
            return
        if call == "start" and self._tensorboard:
            self.writer(training)

        place = {"epoch": training.epoch, "step": training.step}
        if call == "logged":
            self._folder.add_metrics({**place, **training.metrics})
        if call in ("logged", "evaluated") and self._writer is not None:
            for name, value in training.metrics.items():
                self._writer.add_scalar(name, value, training.step)

        metrics = dict(training.metrics)
        event = Event(_KINDS[call], **place, metrics=metrics, folder=str(training.folder))
        training.world.emit(event)

        for function in self._functions:
            answer = function(event)
            if answer == "stop":
                training.stop()
            elif answer is not None:
                raise JobError(
                    f'on_event: a function returned {answer!r}: return None, or "stop" to end '
                    "the training"
                )

    def writer(self, training: TrainingContext) -> Any:
        """Return what writes TensorBoard's file of events in the run's folder; None on other ranks
        than the first.

        Raises:
            JobError: the job doesn't write for TensorBoard, or it isn't installed.
        """
        if not self._tensorboard:
            raise JobError(
                "training.writer: the job doesn't write for TensorBoard: give tensorboard=True, or "
                "--tensorboard"
            )
        if self._is_first and self._writer is None:
            self._writer = _opened(training)
        return self._writer

    def close(self) -> None:
        """Write out what TensorBoard hasn't written yet."""
        if self._writer is not None:
            self._writer.close()


def _opened(training: TrainingContext) -> Any:
    """Open TensorBoard's file of events.

    Raises:
        JobError: TensorBoard isn't installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError(
            "tensorboard: it isn't installed: pip install torch-lockstep[tensorboard]"
        ) from error

    # What was written beyond the step of a resumed run is left out.
    purge_step = training.step + 1 if training.step else None
    return SummaryWriter(str(training.folder), purge_step=purge_step)
