"""How far a training has come: what each checkpoint keeps beside the states of the model, the
optimizer and the callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.model.losses.loss import Loss

_SAVED = (
    "epoch",
    "position",
    "step",
    "record",
    "stopped",
    "ends_unevaluated",
    "owed",
    "judged",
)
_SAVED_LOSSES = ("partial", "recent")


@dataclass
class TrainingProgress:
    """How far a training has come, and whether it is over; alike on every rank.

    Attributes:
        last_epoch: the number of epochs to train; None where only the steps are counted.
        last_step: the job's number of steps; None where only the epochs are counted.

        epoch: completed epochs.
        position: completed batches of the next epoch.
        step: completed updates.
        record: the last record of an epoch in ``metrics.jsonl``; None before the first one.
        stopped: what ended the training early: ``on_event``, or the name of a callback.
        ends_unevaluated: whether the training ends where no evaluation was due.
        owed: whether an evaluation is due at this step.
        judged: the last evaluation's loss, until the scheduler of epochs has been given it.
        partial: the loss of the completed batches of the next epoch.
        recent: the loss of the updates since the last log.

        values: what is known of the last epoch, by name.
        interrupted: whether the ranks stop because of a signal.
        samples: the samples of all global batches since this process began.
        seconds: seconds in which it trained on them.
        paused: seconds of evaluations, and of all that an epoch ends with.
    """

    last_epoch: int | None
    last_step: int | None

    # What a checkpoint keeps.
    epoch: int = 0
    position: int = 0
    step: int = 0
    record: dict[str, Any] | None = None
    stopped: str = ""
    ends_unevaluated: bool = False
    owed: bool = False
    judged: float | None = None
    partial: Loss = field(default_factory=lambda: Loss(0.0, 0.0))
    recent: Loss = field(default_factory=lambda: Loss(0.0, 0.0))

    # What counts in this process only.
    values: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    samples: int = 0
    seconds: float = 0.0
    paused: float = 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        state = {name: getattr(self, name) for name in _SAVED}
        for name in _SAVED_LOSSES:
            loss: Loss = getattr(self, name)
            state[name] = (loss.total, loss.count, loss.parts)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave, perhaps in an earlier version, which had fewer values."""
        for name in _SAVED:
            setattr(self, name, state.get(name, getattr(self, name)))
        for name in _SAVED_LOSSES:
            if state.get(name) is not None:
                setattr(self, name, Loss(*state[name]))

        if self.record is not None:  # the run may lack only its last files
            self.values = dict(self.record)
            del self.values["epoch"], self.values["step"]

    # ---- the end ---------------------------------------------------------------------------------

    def stop(self, by: str) -> None:
        """End the training at this step; "" changes nothing."""
        self.stopped = by or self.stopped

    @property
    def is_at_last_step(self) -> bool:
        """Return whether no further update is to be made."""
        if self.stopped:
            return True
        return self.last_step is not None and self.step >= self.last_step

    @property
    def is_over(self) -> bool:
        """Return whether the training has come to its end, and its last epoch has a record.

        A run that was interrupted in its last step has no record of it yet.
        """
        is_recorded = self.record is not None and self.record["step"] == self.step
        if self.stopped or (self.is_at_last_step and is_recorded):
            return True
        return self.last_epoch is not None and self.epoch >= self.last_epoch

    @property
    def is_beyond_end(self) -> bool:
        """Return whether more was done than is asked for now."""
        if self.last_step is not None and self.step > self.last_step:
            return True
        if self.last_epoch is None:
            return False
        return (self.epoch, self.position) > (self.last_epoch, 0)

    def ends_with_epoch(self, *, finished: bool) -> bool:
        """Return whether the training ends with the epoch that was trained just now."""
        return self.is_at_last_step or (finished and self.number == self.last_epoch)

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Return the number, from 1, of the epoch that is trained next or now."""
        return self.epoch + 1

    def end_batch(self, step: int) -> None:
        """Count a batch, with which the updates came to ``step``."""
        self.position += 1
        self.step = step

    def end_training_of_epoch(self, samples: int, seconds: float) -> None:
        """Count what was trained in an epoch, or in the rest of one."""
        self.samples += samples
        self.seconds += seconds

    def end_epoch(self) -> None:
        """Begin with the next epoch."""
        self.epoch += 1
        self.position = 0

    def write_record(self, number: int) -> dict[str, Any]:
        """Make the values of an epoch the last record, and return it."""
        self.record = {"epoch": number, "step": self.step, **self.values}
        return self.record

    def end_evaluation(self, values: Mapping[str, float]) -> None:
        """Note that this step was evaluated."""
        self.owed = False
        if self.step:  # a scheduler goes by what was trained
            self.judged = values.get("eval_loss")
