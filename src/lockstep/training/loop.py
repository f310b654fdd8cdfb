"""The training loop that every rank runs: epochs, evaluation, saving.

The loop is the same under every strategy. Whatever the ranks must agree on (the end, the best
epoch, a stop) follows from numbers that were summed over the ranks, or is sent by rank 0.

A training goes through these, in this order::

    resume            take up the newest checkpoint, where a run is resumed
    open the run      config.json, the opening lines, on_start
    begin             what is closed at the end, and a trial evaluation
    each epoch        updates; logs, evaluations and checkpoints within the epoch
                      the evaluation at its end, the scheduler, the checkpoint, the record
    end               an evaluation that was not due, the final weights, summary.json, on_finish

How far it has come is one object, ``TrainingProgress``, which every checkpoint keeps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.data import Batch, fingerprint, is_stream
from lockstep.errors import counted
from lockstep.job import Job
from lockstep.jobfile import the_job
from lockstep.launch.events import Line
from lockstep.launch.hang_report import Watch
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.stop_request import left_to_the_launcher
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.profiling import Profiler
from lockstep.strategies.steps.update_result import Result, Sums
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.training.audit import Audit
from lockstep.training.batch_shapes import FirstStep, line_of
from lockstep.training.callbacks.dispatch import Callbacks
from lockstep.training.callbacks.event_reporter import EventReporter
from lockstep.training.evaluation import Evaluations, try_out
from lockstep.training.logs import Logs, Pace
from lockstep.training.opening import changes, keep_records, opening
from lockstep.training.progress import TrainingProgress
from lockstep.training.resume import has_ended, nothing_left
from lockstep.training.saves import Saves
from lockstep.training.scheduler import move_on
from lockstep.training.setup import Plan, Setup, for_devices, write_config, write_summary
from lockstep.training.triggers import EVALUATE, LOG, SAVE, Triggers


def train_on(world: World, plan: Plan) -> tuple[dict[str, Any], str]:
    """Train on this rank.

    Returns:
        the run's summary (empty where it was stopped) and its folder, alike on every rank.
    """
    plan = for_devices(plan, world)
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
            stack.enter_context(left_to_the_launcher())
        if job.keep_memory:
            stack.enter_context(freed_memory_kept())

        return _Training(world, plan, job, folder).run(), path


class _Training:
    """One training on one rank.

    Attributes:
        setup: what the training is made of.
        progress: how far it has come.
        shapes: of the first update, for the summary.
        logs: on rank 0, where the job has logs within epochs.
        audit: where the samples of each step are written down.
        profiler: where steps are profiled.
    """

    def __init__(self, world: World, plan: Plan, job: Job, folder: RunFolder) -> None:
        self.world = world
        self.plan = plan
        self.job = job
        self.folder = folder

        self.setup = Setup(world, plan, job, folder)
        self.step = self.setup.step
        self.loader = self.setup.loader
        self.progress = TrainingProgress(self.setup.epochs, job.steps)

        # Ranks that don't meet in their updates would wait here for one another.
        self.first_step = FirstStep(self.step) if self.step.together else None
        self.shapes: dict[str, Any] = {}

        self.evaluations = Evaluations(job, self.step, self.setup.eval_loaders)
        self.reporter = EventReporter(world, job, folder)
        self.callbacks = Callbacks(job, self.step, folder.path, self.reporter)
        self.saves = Saves(self.setup, self.callbacks)

        self.logs: Logs | None = None
        self.audit: Audit | None = None
        self.profiler: Profiler | None = None

    # ---- the whole -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end, or until the ranks are asked to stop; return the summary."""
        began = time.perf_counter()
        progress = self.progress
        if self.plan.resume:
            self._resume()
        self._open_run()

        with contextlib.ExitStack() as stack:
            self._begin(stack)
            while not (progress.is_over or progress.interrupted):
                self._one_epoch()
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
            summary = write_summary(self.setup, progress, self.shapes, seconds)
            self.callbacks.call("finish", progress.epoch, progress.values)

        return summary

    def _resume(self) -> None:
        """Take up the newest checkpoint.

        Raises:
            JobError: the run has done all that is asked for.
        """
        progress = self.progress
        world = self.world
        state = self.saves.load()
        progress.load_state(state)
        world.step = progress.step
        if self.step.together or world.is_first:
            self.step.skips.number = state.get("skipped", 0)

        if self._has_ended():
            if progress.stopped:
                after = counted(progress.epoch, "epoch")
                note = f"{progress.stopped} had stopped the run after {after}: it goes on"
                self.saves.notes.append(note)
            progress.stopped = ""
            progress.ends_unevaluated = False
            if progress.is_at_last_step:
                raise nothing_left(progress.epoch, world.step, None)
            if progress.is_over:
                raise nothing_left(progress.epoch, world.step, progress.last_epoch or 1)

        if world.is_first:
            self.setup.notes += map(Line.note, changes(self.setup, progress.data))
        self.saves.load_data()

    def _has_ended(self) -> bool:
        """Return whether the run that is resumed had come to its end, or beyond what is asked for
        now.
        """
        if self.progress.is_beyond_end:
            return True
        if self.plan.again:  # only its last files are missing
            return False
        return self.world.broadcast_object(has_ended(self.folder, self.world.step))

    def _open_run(self) -> None:
        """Write the run's config, log what is trained, and call ``on_start``.

        Only here, when a resumed run can no longer be refused, does its folder change.
        """
        progress = self.progress
        setup = self.setup
        world = self.world
        self.triggers = Triggers(
            self.job, world, self.loader.batches_of, together=self.step.together
        )
        setup.notes += map(Line.note, self.saves.notes)
        setup.notes += map(Line.note, self.triggers.notes())

        if world.is_first:
            write_config(setup)
            keep_records(setup, progress)
            for line in opening(setup, progress.epoch):
                world.tell(line)
            self.step.tell_once(self.step.caveats())

        self.callbacks.call("start", progress.epoch, {})
        if not self.plan.resume:
            self.saves.refuse_unsaveable()
        self.step.saved.note_what_is_not_kept()

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Make what is closed at the end, and evaluate a first batch.

        Args:
            stack: is left at the end of the training, however it ends.

        Raises:
            JobError: a metric is wrong, or the job goes by one that there is not.
        """
        job = self.job
        setup = self.setup
        world = self.world
        stack.callback(self.saves.settle)
        stack.callback(self.reporter.close)
        for loader in (self.loader, *setup.eval_loaders.values()):
            stack.callback(loader.close)

        if self.plan.profile:
            to_go = None if setup.steps is None else setup.steps - world.step
            self.profiler = stack.enter_context(Profiler(world, self.step, self.folder, to_go))

        had_audit = self.plan.resume and world.broadcast_object(self.folder.audit.is_dir())
        if self.plan.audit or had_audit:  # an audit with a gap would say nothing
            has_order = job.order is not None
            self.audit = Audit(world, self.folder, setup.train_data, order=has_order)
            stack.callback(self.audit.close)

        has_streams = any(map(is_stream, setup.eval_data.values()))
        if not self.plan.resume and not has_streams:
            values = try_out(self.step, setup.eval_loaders, job.metrics, world, job.seed)
            self.saves.refuse_unknown(values)

        if job.log_every is not None and world.is_first:
            self.logs = Logs(job, self.step, setup.steps, self.progress)

    # ---- one epoch -------------------------------------------------------------------------------

    def _one_epoch(self) -> None:
        """Train an epoch, or what is left of one, evaluate it and save."""
        progress = self.progress
        setup = self.setup
        number = progress.number

        paused = progress.paused
        began = time.perf_counter()
        samples, finished = self._train_epoch()
        trained = time.perf_counter()
        seconds = trained - began - (progress.paused - paused)

        self.step.check()
        if progress.interrupted:
            self._save_interrupted()
            return

        progress.end_training_of_epoch(samples, seconds)
        group = self.step.optimizer.param_groups[0]
        lr = float(group.get("lr", math.nan))
        if finished:
            self._call("log", number)
            self._call("epoch", number)
        if self.callbacks:  # they may have changed the weights that were evaluated
            self.evaluations.forget()

        ends = progress.ends_with_epoch(finished=finished)
        is_due = self.triggers.evaluates_at_end(number, setup.eval_loaders)
        evaluates = finished and (progress.owed or is_due)
        progress.ends_unevaluated = ends and not evaluates
        if evaluates:
            progress.values |= self._evaluate()

        progress.values["lr"] = lr
        progress.values["seconds"] = seconds
        progress.values["samples_per_second"] = samples / seconds if seconds else 0.0
        is_shown = evaluates or self.triggers.at_end(LOG, number)
        is_shown = is_shown and not progress.ends_unevaluated
        if is_shown:
            is_whole = evaluates or not setup.eval_loaders
            self._call("evaluated", number, whole=is_whole)

        if finished:
            progress.end_epoch()
            self._move_scheduler_of_epochs()

        is_saved = (
            ends
            or bool(progress.stopped)
            or self.triggers.at_end(SAVE, number)
            or self.saves.is_best(progress.values)
        )
        self._end_epoch(number, is_saved=is_saved, is_shown=is_shown)
        progress.paused += time.perf_counter() - trained

    def _train_epoch(self) -> tuple[int, bool]:
        """Make the updates of an epoch that are still to come.

        Returns:
            the samples of these updates, and whether the epoch came to its end.
        """
        progress = self.progress
        world = self.world
        # Where ranks don't meet in an update, rank 0 has the loss of all so far.
        has_partial = self.step.together or world.is_first
        before = progress.partial if has_partial else None
        then = None if self.logs is None else self.logs.add
        sums = Sums(before, then)
        batches = self._batches()
        pace = Pace(world, progress.last_epoch, self.setup.steps)
        samples = 0

        self._after_events()
        if progress.owed:
            self._within(frozenset(), sums)

        for batch in self._until_all_stop(batches):
            result = self._update(batch)
            sums.add(result)
            samples += batch.size
            if self.first_step is not None:
                self._report_shapes(batch.size)
            self._after_update(batch, result)
            pace.show(progress.number, samples, sums)

            due = self.triggers.after_step(progress.epoch, progress.position)
            if due:
                progress.owed = EVALUATE in due
                if LOG in due:
                    self._log(sums)
                self._within(due, sums)

        finished = self._has_finished(batches)
        if self.profiler is not None:
            self.profiler.end_epoch()
        loss = self.step.over_ranks(sums.read())
        progress.partial = Loss(0.0, 0.0) if finished else loss
        if not progress.interrupted:
            progress.values = loss.means("train_")
        return samples, finished

    def _batches(self) -> Iterator[Batch]:
        """Return the batches of an epoch that are still to come."""
        if self.callbacks.are_own or self.job.on_event:  # they may have changed the data
            for loader in (self.loader, *self.setup.eval_loaders.values()):
                loader.renew_workers()

        progress = self.progress
        batches = self.loader.epoch(progress.epoch, progress.position)
        if self.profiler is not None:
            return self.profiler.over(batches)
        return batches

    def _update(self, batch: Batch) -> Result:
        """Make one update; the first one also notes which data they are."""
        if not self.progress.data:
            data = self.setup.train_data
            length = None if is_stream(data) else len(data)
            self.progress.data = fingerprint(batch, length, self.job.collate)

        self.step.seed(self.job.seed)
        return self.step.update(batch)

    def _after_update(self, batch: Batch, result: Result) -> None:
        """Count an update, and pass it on to all that follows updates."""
        progress = self.progress
        progress.end_batch(self.world.step)
        if self.audit is not None:
            self.audit.note(progress.step, batch)
        self.saves.check()

        if self.job.lr_scheduler_every == "step":
            move_on(self.setup.scheduler, result, self.step)
        if self.callbacks.by_step:
            progress.stop(self.callbacks.stepped(result, progress.number))
        if self.logs is not None:
            self.logs.note(batch)

    def _until_all_stop(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches up to the last step, or to where the ranks stop together because they
        were asked to.
        """
        progress = self.progress
        step = self.step

        # Ranks that read a stream wait for one another at each batch, so none may leave before the
        # others.
        may_stop = step.together or not is_stream(self.setup.train_data)

        while not progress.is_at_last_step:
            batch = next(batches, None)
            if batch is None:
                break
            yield batch
            if step.stopping and may_stop:
                break

        if self.world.size > 1 and not step.together:
            yield from self._up_to_the_others(batches)
        progress.interrupted = step.stopping

    def _up_to_the_others(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches up to the rank that went furthest.

        Ranks that don't meet in their updates learn of a stop at different batches.
        """
        progress = self.progress
        step = self.step
        places = self.world.gather_objects((progress.position, step.stopping, progress.stopped))
        furthest = max(position for position, _, _ in places)
        yield from itertools.islice(batches, furthest - progress.position)
        step.stopping = any(stopping for _, stopping, _ in places)
        progress.stopped = next((stopped for _, _, stopped in places if stopped), "")

    def _has_finished(self, batches: Iterator[Batch]) -> bool:
        """Return whether an epoch has come to its end, and not only the training."""
        progress = self.progress
        if progress.interrupted:
            return False
        if not progress.is_at_last_step:
            return True

        length = self.loader.batches_of(progress.epoch)
        if length is None:  # of a stream only another batch would show that
            return next(batches, None) is None
        return progress.position >= length

    def _report_shapes(self, size: int) -> None:
        """Log the shapes of the first update, of ``size`` samples, outside and on each device."""
        assert self.first_step is not None
        self.shapes = self.first_step.done(self.world, self.setup.devices, size)
        self.first_step = None
        line = line_of(self.shapes, self.setup.parts)
        if self.world.is_first and line is not None:
            self.world.tell(Line(line))

    def _move_scheduler_of_epochs(self) -> None:
        """Move a scheduler on that moves once an epoch, by the last loss that it wasn't given."""
        if self.job.lr_scheduler_every != "epoch":
            return

        progress = self.progress
        loss = progress.judged if self.setup.eval_loaders else progress.values["train_loss"]
        move_on(self.setup.scheduler, loss, self.step)
        progress.judged = None

    # ---- evaluation and logs ---------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Evaluate this step, with the weights that callbacks put in place."""
        with self.callbacks.evaluating():
            values = self.evaluations.make()
        self.progress.end_evaluation(values)
        self.triggers.done(EVALUATE)
        return values

    def _within(self, due: frozenset[str], sums: Sums) -> None:
        """Evaluate and save within an epoch, as far as that is due; ``sums`` has its loss so far.

        If the ranks are about to stop, whoever resumes the run makes the evaluation before the next
        step.
        """
        progress = self.progress
        is_end = progress.position == self.loader.batches_of(progress.epoch)
        if is_end or progress.is_at_last_step or self.step.stopping:
            return

        self.step.check()
        progress.partial = sums.read()
        values: dict[str, float] = {}
        if progress.owed:
            began = time.perf_counter()
            values = self._evaluate()
            self._call("evaluated", progress.number, values)
            if values:
                self._add_record({"epoch": progress.number, "step": progress.step, **values})
            progress.paused += time.perf_counter() - began
            self._after_events()

        if SAVE in due or progress.stopped or self.saves.is_best(values):
            self._checkpoint(values)

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

    def _log(self, sums: Sums) -> None:
        """Log the updates since the last log, with what callbacks add to that."""
        progress = self.progress
        values: dict[str, float] = {}
        if self.logs is not None:
            sums.read()
            values = self.logs.log()

        self.triggers.done(LOG)
        progress.stop(self.callbacks.logged(progress.number, values))
        if self.step.together:  # else the other ranks hear of it at the end of the epoch
            self._after_events()

    def _call(
        self, kind: str, number: int, values: dict[str, float] | None = None, *, whole: bool = True
    ) -> None:
        """Call the callbacks, any of which may stop the training."""
        values = self.progress.values if values is None else values
        self.progress.stop(self.callbacks.call(kind, number, values, whole=whole))

    def _after_events(self) -> None:
        """Look for what callbacks and functions may have changed."""
        if self.job.on_event or self.callbacks:
            self.step.after_events()

    def _add_record(self, record: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``, on rank 0."""
        if self.world.is_first:
            self.folder.add_metrics(record)

    # ---- saving ----------------------------------------------------------------------------------

    def _end_epoch(self, number: int, *, is_saved: bool, is_shown: bool) -> None:
        """Write an epoch's checkpoint and its record.

        Args:
            number: of the epoch, from 1.
            is_saved: whether there is a checkpoint.
            is_shown: whether the epoch has a line in ``metrics.jsonl``.
        """
        progress = self.progress
        if not self.evaluations.is_done:  # an evaluation does this itself
            self.step.after_events()

        record = progress.write_record(number)
        if is_saved:
            self._checkpoint(progress.values)
        if is_shown:
            self._add_record(record)
        if is_saved and not progress.ends_unevaluated:
            self._call_saved(number)

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

    def _checkpoint(self, values: dict[str, float] | None = None) -> None:
        """Begin to write a checkpoint; ``values`` are those of an evaluation of this step."""
        place = {**self.progress.state(), "skipped": self.step.skips.number}
        self.saves.save(place, values)
        self.triggers.done(SAVE)
