"""The training loop that every rank runs: epochs, evaluation, saving.

The loop is the same under every strategy. Whatever the ranks must agree on (the end, the best
epoch, a stop) follows from numbers that were summed over the ranks, or is sent by rank 0.

A training goes through these, in this order, which is also the order of this file::

    run               take up the newest checkpoint, where a run is resumed
                      open the run: config.json, the opening lines, on_start, a trial evaluation
    each epoch        its updates
        each update   what is due after it: a log, an evaluation, a checkpoint
                      the evaluation at its end, the scheduler, the checkpoint, the record
    end               an evaluation that was not due, the final weights, summary.json, on_finish

How far it has come is one object, ``TrainingProgress``, which every checkpoint keeps. Where an
epoch ends is ``EpochBatches``; when something is due within one is ``Triggers``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

from lockstep.data import Batch, is_stream
from lockstep.job import Job
from lockstep.jobfile import the_job
from lockstep.launch.hang_report import Watch
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.run.events import Line
from lockstep.run.run_folder import RunFolder
from lockstep.run.stop_request import leave_to_the_launcher
from lockstep.strategies.steps.update_result import Sums
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.training.callbacks.dispatch import Callbacks
from lockstep.training.callbacks.event_reporter import EventReporter
from lockstep.training.checkpoint_content import Saves
from lockstep.training.epoch_batches import EpochBatches
from lockstep.training.evaluation import evaluate_sets, try_out
from lockstep.training.load_checkpoint import take_up
from lockstep.training.progress import TrainingProgress
from lockstep.training.records.update_records import UpdateRecords
from lockstep.training.scheduler import move_on
from lockstep.training.setup import Plan, Setup, write_summary
from lockstep.training.start_notes import open_run
from lockstep.training.triggers import EVALUATE, LOG, SAVE, Triggers


def train_on(world: World, plan: Plan) -> tuple[dict[str, Any], str]:
    """Train on this rank.

    Returns:
        the run's summary (empty where it was stopped) and its folder, alike on every rank.
    """
    job = the_job(plan.job)
    path = world.broadcast_object(plan.folder)
    assert path is not None
    world.folder = path
    folder = RunFolder(path)

    with contextlib.ExitStack() as stack:
        if world.is_first:
            stack.enter_context(folder.held())
        stack.enter_context(Watch(world, plan.timeout, Path(path)))
        if world.is_local_rank:
            leave_to_the_launcher()
        if job.keep_memory:
            stack.enter_context(freed_memory_kept())

        return _Training(world, plan, job, folder).run(), path


class _Training:
    """One training on one rank.

    Attributes:
        setup: what the training is made of.
        progress: how far it has come.
        records: what is logged and written down of updates.
    """

    def __init__(self, world: World, plan: Plan, job: Job, folder: RunFolder) -> None:
        self.world = world
        self.plan = plan
        self.job = job
        self.folder = folder

        self.setup = Setup(world, plan, job, folder)
        self.step = self.setup.step
        self.loader = self.setup.loader
        self.progress = TrainingProgress(self.setup.epochs, job.steps, owed=job.eval_at_start)
        self.records = UpdateRecords(self.setup, self.progress)

        self.has_evaluated = False
        self.reporter = EventReporter(world, job, folder)
        self.callbacks = Callbacks(job, self.step, folder.path, self.reporter)
        self.saves = Saves(self.setup, self.callbacks)

    # ---- the whole -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end, or until the ranks are asked to stop; return the summary."""
        began = time.perf_counter()
        progress = self.progress
        if self.plan.resume:
            take_up(self.setup, self.saves, progress)
        self._open()

        with contextlib.ExitStack() as stack:
            self._begin(stack)
            while not (progress.is_over or progress.interrupted):
                self._epoch()
            if progress.interrupted:
                self.saves.finish()
                return {}

            if progress.ends_unevaluated:
                self._evaluate_end()
            self.step.check()
            self.step.skips.refuse_all()
            self.saves.finish()
            self.step.saved.write_weights(self.folder.model)

            seconds = time.perf_counter() - began
            summary = write_summary(self.setup, progress, self.records.shapes, seconds)
            self.callbacks.call("finish", progress.epoch, progress.values)

        return summary

    def _open(self) -> None:
        """Write the run's config, log what is trained, and call ``on_start``.

        Only here, when a resumed run can no longer be refused, does its folder change.
        """
        batches_of = self.loader.batches_of
        self.triggers = Triggers(self.job, self.step, batches_of)
        self.setup.notes += map(Line.note, self.saves.notes)
        self.setup.notes += map(Line.note, self.triggers.notes())

        if self.world.is_first:
            open_run(self.setup, self.progress)
            self.step.log_once(self.step.caveats())

        self.callbacks.call("start", self.progress.epoch, {})
        self.step.saved.restore_flags()

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Open what is closed at the end, and evaluate a first batch.

        Args:
            stack: is left at the end of the training, however it ends.

        Raises:
            JobError: a metric is wrong, or the job goes by one that there is not.
        """
        setup = self.setup
        stack.callback(self.saves.settle)
        stack.callback(self.reporter.close)
        for loader in setup.loaders:
            stack.callback(loader.close)
        self.records.open(stack)

        has_streams = any(map(is_stream, setup.eval_data.values()))
        if not self.plan.resume and not has_streams:
            values = try_out(self.step, setup.eval_loaders, self.job)
            self.saves.refuse_unknown(values)

    # ---- one epoch -------------------------------------------------------------------------------

    def _epoch(self) -> None:
        """Train an epoch, or what is left of one, evaluate it and save."""
        progress = self.progress
        paused = progress.paused
        began = time.perf_counter()
        has_ended = self._updates()
        trained = time.perf_counter()
        seconds = trained - began - (progress.paused - paused)

        self.step.check()
        if progress.interrupted:
            self._save_interrupted()
            return

        progress.end_training_of_epoch(self.records.samples, seconds)
        self._end_epoch(self.records.rates(seconds), has_ended=has_ended)
        progress.paused += time.perf_counter() - trained

    def _updates(self) -> bool:
        """Make the updates of an epoch that are still to come; return whether it has ended."""
        progress = self.progress
        # Where ranks don't meet in an update, rank 0 has the loss of all so far.
        has_partial = self.step.together or self.world.is_first
        before = progress.partial if has_partial else None
        is_logged = self.world.is_first and self.job.log_every is not None
        sums = Sums(before, self.records.logs.add if is_logged else None)

        if self.callbacks.are_own or self.job.on_event:  # they may have changed the data
            for loader in self.setup.loaders:
                loader.renew_workers()
        rest = self.loader.epoch(progress.epoch, progress.position)
        batches = EpochBatches(self.setup, progress, self.records.begin_epoch(rest))

        self._after_events()
        if progress.owed:
            self._do(frozenset({EVALUATE}), sums)

        for batch in batches:
            self._update(batch, sums)
            due = self.triggers.after_step(progress.epoch, progress.position)
            if due:
                self._do(due, sums)

        has_ended = batches.have_ended()
        self.records.end_epoch()
        loss = self.step.over_ranks(sums.read())
        progress.partial = Loss(0.0, 0.0) if has_ended else loss
        if not progress.interrupted:
            progress.values = loss.means("train_")
        return has_ended

    def _end_epoch(self, rates: dict[str, float], *, has_ended: bool) -> None:
        """Evaluate an epoch, move the scheduler on, save, and write the epoch's record.

        Args:
            rates: further values of the epoch.
            has_ended: False where the training ends within the epoch.
        """
        progress = self.progress
        number = progress.number
        if has_ended:
            self._call("log", number)
            self._call("epoch", number)

        ends = progress.ends_with_epoch(finished=has_ended)
        is_due = self.triggers.evaluates_at_end(number, self.setup.eval_loaders)
        evaluates = has_ended and (progress.owed or is_due)
        progress.ends_unevaluated = ends and not evaluates
        if evaluates:
            progress.values |= self._evaluate()
        progress.values |= rates

        is_shown = evaluates or self.triggers.at_end(LOG, number)
        is_shown = is_shown and not progress.ends_unevaluated
        if is_shown:
            is_whole = evaluates or not self.setup.eval_loaders
            self._call("evaluated", number, whole=is_whole)

        if has_ended:
            progress.end_epoch()
            self._move_scheduler_of_epochs()

        if not (evaluates and self.setup.eval_loaders):  # an evaluation does this itself
            self.step.after_events()
        record = progress.write_record(number)
        is_saved = ends or bool(progress.stopped) or self.triggers.at_end(SAVE, number)
        is_saved = is_saved or self.saves.is_best(progress.values)
        if is_saved:
            self._checkpoint(progress.values)
        if is_shown:
            self._add_record(record)
        if is_saved and not progress.ends_unevaluated:
            self._call_saved(number)

    def _move_scheduler_of_epochs(self) -> None:
        """Move a scheduler on that moves once an epoch, by the last loss that it wasn't given."""
        if self.job.lr_scheduler_every != "epoch":
            return

        progress = self.progress
        loss = progress.judged if self.setup.eval_loaders else progress.values["train_loss"]
        move_on(self.setup.scheduler, loss)
        progress.judged = None

    # ---- one update ------------------------------------------------------------------------------

    def _update(self, batch: Batch, sums: Sums) -> None:
        """Make one update, count it, and pass it on to all that follows updates."""
        progress = self.progress

        self.step.seed(self.job.seed)
        self.step.measures_norm = self.triggers.wants_norm(progress.epoch, progress.position)
        result = self.step.update(batch)
        sums.add(result)
        progress.end_batch(self.world.step)
        self.records.note(batch, sums)
        self.saves.check()

        if self.job.lr_scheduler_every == "step":
            move_on(self.setup.scheduler, result)
        if self.callbacks.by_step:
            progress.stop(self.callbacks.stepped(result, progress.number))

    # ---- what is due after an update -------------------------------------------------------------

    def _do(self, due: frozenset[str], sums: Sums) -> None:
        """Log, evaluate and save within an epoch, as far as that is due.

        Args:
            due: what the triggers gave.
            sums: the loss of the epoch so far.
        """
        progress = self.progress
        progress.owed = EVALUATE in due
        if LOG in due:
            self._log(sums)

        if not self._goes_on():
            return

        self.step.check()
        progress.partial = sums.read()
        values = self._evaluate_within() if progress.owed else {}
        if SAVE in due or progress.stopped or self.saves.is_best(values):
            self._checkpoint(values)

    def _goes_on(self) -> bool:
        """Return whether there is another update in this epoch.

        The end of an epoch evaluates and saves by itself. If the ranks are about to stop, whoever
        resumes the run makes an evaluation that is owed before the next update.
        """
        progress = self.progress
        is_end = progress.position == self.loader.batches_of(progress.epoch)
        return not (is_end or progress.is_at_last_step or self.step.stopping)

    def _log(self, sums: Sums) -> None:
        """Log the updates since the last log, with what callbacks add to that."""
        progress = self.progress
        values: dict[str, float] = {}
        if self.world.is_first:
            sums.read()
            values = self.records.logs.log()

        self.triggers.done(LOG)
        progress.stop(self.callbacks.logged(progress.number, values))
        if self.step.together:  # else the other ranks hear of it at the end of the epoch
            self._after_events()

    def _evaluate_within(self) -> dict[str, float]:
        """Evaluate within an epoch, write that down, and return the values."""
        progress = self.progress
        began = time.perf_counter()
        values = self._evaluate()
        self._call("evaluated", progress.number, values)
        if values:
            self._add_record({"epoch": progress.number, "step": progress.step, **values})
        progress.paused += time.perf_counter() - began
        self._after_events()
        return values

    # ---- evaluations -----------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Evaluate this step, with the weights that callbacks put in place."""
        loaders = self.setup.eval_loaders
        evaluate = functools.partial(evaluate_sets, self.step, loaders, self.job, prefix="eval_")
        checks = not self.has_evaluated
        most = self.job.eval_batches
        values = self.callbacks.values_of(lambda: evaluate(checks=checks, most=most))
        self.has_evaluated = True
        self.progress.end_evaluation(values)
        self.triggers.done(EVALUATE)
        return values

    def _evaluate_end(self) -> None:
        """Evaluate a training that ends within an epoch, or where no evaluation was due.

        It is saved by then: a resumed run must have nothing that the scheduler or callbacks make of
        this evaluation.
        """
        progress = self.progress
        is_within = progress.position > 0
        number = progress.number if is_within else progress.epoch
        if is_within:
            self._call("log", number)
            self._call("epoch", number, whole=False)

        values = self._evaluate()
        progress.values |= values
        self._call("evaluated", number)
        self.saves.save_best(values)
        self._add_record({"epoch": number, "step": progress.step, **progress.values})
        self._call("saved", number)

    def _add_record(self, record: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``, on rank 0."""
        if self.world.is_first:
            self.folder.add_metrics(record)

    # ---- callbacks -------------------------------------------------------------------------------

    def _call(
        self, kind: str, number: int, values: dict[str, float] | None = None, *, whole: bool = True
    ) -> None:
        """Call the callbacks; each may stop the training."""
        values = self.progress.values if values is None else values
        self.progress.stop(self.callbacks.call(kind, number, values, whole=whole))

    def _after_events(self) -> None:
        """Look for what callbacks and functions may have changed."""
        if self.job.on_event or self.callbacks:
            self.step.after_events()

    # ---- saving ----------------------------------------------------------------------------------

    def _checkpoint(self, values: dict[str, float] | None = None) -> None:
        """Begin to write a checkpoint; ``values`` are those of an evaluation of this step."""
        place = {**self.progress.state(), "skipped": self.step.skips.number}
        self.saves.save(place, values)
        self.triggers.done(SAVE)

    def _save_interrupted(self) -> None:
        """Write the checkpoint of a training that a signal stops within an epoch."""
        self.step.after_events()
        self._checkpoint()
        if not self.progress.ends_unevaluated:
            self._call_saved(self.progress.number)

    def _call_saved(self, number: int) -> None:
        """Call ``on_saved``; a stop by it is saved too."""
        before = self.progress.stopped
        self._call("saved", number)
        if self.progress.stopped and not before:
            self._checkpoint()
