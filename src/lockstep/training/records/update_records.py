"""What is logged and written down of updates, where that is asked for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from lockstep.data import Batch
from lockstep.profiling import Profiler
from lockstep.run.events import Line
from lockstep.strategies.steps.update_result import Sums
from lockstep.training.progress import TrainingProgress
from lockstep.training.records.audit import Audit
from lockstep.training.records.batch_shapes import FirstStep, line_of
from lockstep.training.records.logs import Logs
from lockstep.training.setup import Setup


class UpdateRecords:
    """The shapes of the first update, the samples of each, logs, the pace and a profile.

    Args:
        setup: what is trained.
        progress: of the training.

    Attributes:
        shapes: of the first update on each device, for the summary.
        samples: of the updates of this epoch.
        logs: of this rank.
    """

    def __init__(self, setup: Setup, progress: TrainingProgress) -> None:
        self._setup = setup
        self._progress = progress
        self._first_step: FirstStep | None = FirstStep(setup.step)
        self.shapes: list[dict[str, Any]] = []
        self.samples = 0
        self.logs: Logs
        self._audit: Audit | None = None
        self._profiler: Profiler | None = None

    def open(self, stack: contextlib.ExitStack) -> None:
        """Begin with what was asked for; ``stack`` closes it."""
        setup = self._setup
        plan = setup.plan
        world = setup.world
        self.logs = Logs(setup, self._progress)
        if plan.profile:
            to_go = None
            if setup.steps is not None:
                to_go = setup.steps - world.step
            profiler = Profiler(world, setup.step, setup.folder, to_go)
            self._profiler = stack.enter_context(profiler)

        had_audit = plan.resume and world.broadcast_object(setup.folder.audit.is_dir())
        if plan.audit or had_audit:  # an audit with a gap would say nothing
            has_order = setup.job.order is not None or setup.job.batches is not None
            self._audit = Audit(world, setup.folder, setup.train_data, order=has_order)
            stack.callback(self._audit.close)

    def begin_epoch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Begin with an epoch, or the rest of one; return its batches, perhaps profiled."""
        self.samples = 0
        return batches if self._profiler is None else self._profiler.over(batches)

    def note(self, batch: Batch, sums: Sums) -> None:
        """Note an update; ``sums`` has the loss of the epoch so far."""
        self.samples += batch.size
        if self._setup.step.together:  # else the ranks meet at the end of the epoch
            self._log_shapes()
        if self._audit is not None:
            self._audit.note(self._progress.step, batch)
        self.logs.note(batch, sums)

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the learning rate, and how fast an epoch was trained, by name."""
        group = self._setup.step.optimizer.param_groups[0]
        return {
            "lr": float(group.get("lr", math.nan)),
            "seconds": seconds,
            "samples_per_second": self.samples / seconds if seconds else 0.0,
        }

    def end_epoch(self) -> None:
        """End an epoch."""
        if self._profiler is not None:
            self._profiler.end_epoch()
        if self.samples:
            self._log_shapes()

    def _log_shapes(self) -> None:
        """Log the shapes on the devices after the first update; all ranks meet."""
        if self._first_step is None:
            return
        self.shapes = self._first_step.done(self._setup.devices)
        self._first_step = None
        line = line_of(self.shapes, self._setup.microbatches)
        if self._setup.world.is_first and line is not None:
            self._setup.world.emit(Line(line))
