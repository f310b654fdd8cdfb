"""The training loop that every rank runs: epochs, evaluation, saving.

The loop is the same under every strategy. Whatever the ranks must agree on (the end, the best
epoch, a stop) follows from numbers that have been summed over them, or is told by rank 0.
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
from lockstep.strategies.steps.update_result import Sums
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.training.audit import Audit
from lockstep.training.batch_shapes import FirstStep, line_of
from lockstep.training.callbacks.dispatch import Callbacks
from lockstep.training.evaluation import Evaluations, try_out
from lockstep.training.logs import Logs
from lockstep.training.progress import Pace, Teller
from lockstep.training.resume import has_ended, nothing_left
from lockstep.training.saves import Saves
from lockstep.training.scheduler import move_on
from lockstep.training.setup import Plan, Setup, for_devices
from lockstep.training.triggers import EVALUATE, LOG, SAVE, Triggers


def train_on(world: World, plan: Plan) -> tuple[dict[str, Any], str]:
    """Train on this rank; gives the run's summary (empty where it was stopped) and its folder,
    alike on every rank.
    """
    plan = for_devices(plan, world)
    job = the_job(plan.job)
    world.folder = path = world.broadcast_object(plan.folder)
    assert path is not None
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


class _Training(Setup):
    """The state of one training on one rank."""

    def __init__(self, world: World, plan: Plan, job: Job, folder: RunFolder) -> None:
        super().__init__(world, plan, job, folder)
        self.epoch, self.position = 0, 0  # epochs that are done, and batches of the one that is not
        self.partial = Loss(0.0, 0.0)
        self.stopped = ""  # what has ended the training early: on_event, or the name of a callback
        self.ends_unevaluated = False  # where no evaluation was due
        self.interrupted = False  # by a signal: what was done is saved
        self.record: dict[str, float] = {}
        self.data: dict[str, Any] = {}  # a fingerprint of the training data
        self.kept_record: dict[str, Any] | None = (
            None  # the last line of the metrics, as the state has it
        )
        self.samples, self.seconds = 0, 0.0
        self.paused = 0.0  # seconds of evaluations, and of all that an epoch ends with
        self.profiler: Profiler | None = None
        self.audit: Audit | None = None
        self.first: FirstStep | None = FirstStep(self.step)
        self.evaluations = Evaluations(job, self.step, self.eval_loaders)
        self.logs: Logs | None = None
        self.recent = Loss(0.0, 0.0)  # of the steps since the last log of an earlier process
        self.shapes: dict[str, Any] = {}
        self.told = Teller(world, job, folder)
        self.callbacks = Callbacks(job, self.step, folder.path, self.told)
        self.saves = Saves(
            job, folder, self.step, self.scheduler, self.train_data, self.loader, self.callbacks
        )

    # ---- the whole -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        if self.plan.resume:
            self._resume()
            if self.world.is_first:
                self.note_changes(self.data)
            self.saves.load_data()
        else:
            self.saves.refuse_unsaveable()
        self.triggers = Triggers(
            self.job, self.world, self.loader.batches_of, together=self.step.together
        )
        self._said_before += map(Line.note, (*self.saves.notes, *self.triggers.notes()))
        # Only now that nothing can be refused any more does the folder change.
        if self.world.is_first:
            self.write_config()
            self.keep_records(self.epoch, self.kept_record)
        for told_of in self.opening(self.epoch) if self.world.is_first else ():
            self.world.tell(told_of)
        self.step.tell_once(self.step.caveats() if self.world.is_first else ())
        self.callbacks.call("start", self.epoch, {})
        self.step.tell_what_is_not_kept()
        if self.plan.profile:
            to_go = None if self.steps is None else self.steps - self.world.step
            self.profiler = Profiler(self.world, self.step, self.folder, to_go)
        with contextlib.ExitStack() as stack:
            stack.callback(self.saves.settle)
            stack.callback(self.told.close)
            for loader in (self.loader, *self.eval_loaders.values()):
                stack.callback(loader.close)
            if self.profiler is not None:
                stack.enter_context(self.profiler)
            before = self.plan.resume and self.world.broadcast_object(self.folder.audit.is_dir())
            if self.plan.audit or before:  # an audit with a gap would say nothing
                self.audit = Audit(
                    self.world, self.folder, self.train_data, order=self.job.order is not None
                )
                stack.callback(self.audit.close)
            if not self.plan.resume and not any(map(is_stream, self.eval_data.values())):
                self.saves.refuse_unknown(
                    try_out(
                        self.step, self.eval_loaders, self.job.metrics, self.world, self.job.seed
                    )
                )
            if self.job.log_every is not None and self.world.is_first:
                self.logs = Logs(self.job, self.step, self.steps, self.recent)
            while not (self._is_done() or self.interrupted):
                self._one_epoch()
            if self.interrupted:
                self.saves.finish()
                return {}
            if self.ends_unevaluated:
                self._evaluate_end()
            self.step.check()
            self.step.skips.refuse_all()
            self.saves.finish()
            self.step.write_weights(self.folder.model)
            summary = self.summary(
                time.perf_counter() - began,
                self.epoch,
                self.record,
                self.shapes,
                self.samples,
                self.seconds,
            )
            self.callbacks.call("finish", self.epoch, self.record)
        return summary

    def _is_done(self) -> bool:
        # A run that was stopped in its last step has no record of it yet.
        is_recorded = self.kept_record is not None and self.kept_record["step"] == self.world.step
        if self.stopped or (self._is_at_last_step and is_recorded):
            return True
        return self.epochs is not None and self.epoch >= self.epochs

    # ---- one epoch -------------------------------------------------------------------------------

    def _one_epoch(self) -> None:
        number = self.epoch + 1
        start, paused = time.perf_counter(), self.paused
        samples, losses, finished = self._train_epoch()
        trained = time.perf_counter()
        seconds = trained - start - (self.paused - paused)
        self.step.check()
        if self.interrupted:
            self._save(number)
            return
        self.samples += samples
        self.seconds += seconds
        lr = float(self.step.optimizer.param_groups[0].get("lr", math.nan))
        self.record = losses
        if finished:
            self._call("log", number)
            self._call("epoch", number)
        if self.callbacks:  # which the last evaluation within a stream's epoch came before
            self.evaluations.forget()
        ends = bool(self.stopped) or self._is_at_last_step or (finished and number == self.epochs)
        evaluates = finished and (
            self.evaluations.owed or self.triggers.evaluates_at_end(number, self.eval_loaders)
        )
        self.ends_unevaluated = ends and not evaluates
        if evaluates:
            self.record |= self._evaluate()
        self.record |= {
            "lr": lr,
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
        }
        shows = not self.ends_unevaluated and (evaluates or self.triggers.at_end(LOG, number))
        if shows:
            self._call("evaluated", number, whole=evaluates or not self.eval_loaders)
        if finished:
            self.epoch, self.position = number, 0
            if self.job.lr_scheduler_every == "epoch":
                judged = self.evaluations.judged if self.eval_loaders else self.record["train_loss"]
                move_on(self.scheduler, judged, self.step)
                self.evaluations.judged = None
        ends = (
            ends
            or bool(self.stopped)
            or self.triggers.at_end(SAVE, number)
            or self.saves.is_best(self.record)
        )
        self._save(number, checkpoint=ends, shows=shows)
        self.paused += time.perf_counter() - trained

    def _evaluate(self) -> dict[str, float]:
        with self.callbacks.evaluating():
            values = self.evaluations.make()
        self.triggers.done(EVALUATE)
        return values

    def _train_epoch(self) -> tuple[int, dict[str, float], bool]:
        """Go through the rest of an epoch; gives its samples, its mean losses, and whether it
        came to its end.
        """
        world, job, step = self.world, self.job, self.step
        # Of the part of this epoch that an earlier run has done. (Where ranks sum up at the end,
        # the first one has it.)
        partial = self.partial if step.together or world.is_first else None
        sums = Sums(partial, None if self.logs is None else self.logs.add)
        samples = size = 0  # (that of the first batch)
        if self.callbacks.are_own or job.on_event:  # which may change the data
            for loader in (self.loader, *self.eval_loaders.values()):
                loader.renew_workers()
        batches = self.loader.epoch(self.epoch, self.position)
        if self.profiler is not None:
            batches = self.profiler.over(batches)
        pace = Pace(world, self.epochs, self.steps)
        self._after_events()
        if self.evaluations.owed:
            self._within(frozenset(), sums)
        for batch in self._until_all_stop(batches):
            if not self.data:
                self.data = fingerprint(
                    batch, None if is_stream(self.train_data) else len(self.train_data), job.collate
                )
            step.seed(job.seed)
            result = step.update(batch)
            if self.audit is not None:
                self.audit.note(world.step, batch)
            if self.first is not None and not samples and step.together:
                self._end_first(batch.size)
            sums.add(result)
            size = size or batch.size
            samples += batch.size
            self.position += 1
            self.saves.check()
            if job.lr_scheduler_every == "step":
                move_on(self.scheduler, result, step)
            if self.callbacks.by_step:
                self.stopped = self.callbacks.stepped(result, self.epoch + 1) or self.stopped
            pace.show(self.epoch + 1, samples, sums)
            if self.logs is not None:
                self.logs.note(batch)
            if due := self.triggers.after_step(self.epoch, self.position):
                self.evaluations.owed = EVALUATE in due
                if LOG in due:
                    self._log(sums)
                self._within(due, sums)
        finished = not self.interrupted
        if finished and (self._is_at_last_step or self.stopped):
            of = self.loader.batches_of(self.epoch)
            # Whether a stream has come to its end shows in trying to go on.
            finished = next(batches, None) is None if of is None else self.position >= of
        if self.profiler is not None:
            self.profiler.end_epoch()
        loss = step.over_ranks(sums.read())
        if self.first is not None and size:
            self._end_first(size)
        self.partial = Loss(0.0, 0.0) if finished else loss
        return samples, loss.means("train_"), finished

    def _until_all_stop(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches up to the last step, or to where the ranks stop together because they were
        asked to.
        """
        step, world = self.step, self.world
        # (Ranks that read a stream wait for one another at each batch, so none may leave before the
        # others.)
        may_stop = step.together or not is_stream(self.train_data)
        for batch in () if self._is_at_last_step or self.stopped else batches:
            yield batch
            if self._is_at_last_step or self.stopped or (step.stopping and may_stop):
                break
        if world.size > 1 and not step.together:  # they learn of it at different batches
            places = world.gather_objects((self.position, step.stopping, self.stopped))
            yield from itertools.islice(
                batches, max(position for position, *_ in places) - self.position
            )
            step.stopping = any(stopping for _, stopping, _ in places)
            self.stopped = next((stopped for *_, stopped in places if stopped), "")
        self.interrupted = step.stopping

    @property
    def _is_at_last_step(self) -> bool:
        return bool(self.stopped) or (
            self.job.steps is not None and self.world.step >= self.job.steps
        )

    def _end_first(self, size: int) -> None:
        """After the first update: say the shapes inside and outside."""
        assert self.first is not None
        self.shapes = self.first.done(self.world, self.devices, size)
        self.first = None
        if self.world.is_first and (line := line_of(self.shapes, self.parts)) is not None:
            self.world.tell(Line(line))

    def _call(
        self, kind: str, number: int, values: dict[str, float] | None = None, *, whole: bool = True
    ) -> None:
        values = self.record if values is None else values
        self.stopped = self.callbacks.call(kind, number, values, whole=whole) or self.stopped

    def _after_events(self) -> None:
        if self.job.on_event or self.callbacks:
            self.step.after_events()

    # ---- saving and taking up --------------------------------------------------------------------

    def _save(self, number: int, *, checkpoint: bool = True, shows: bool = True) -> None:
        """At the end of an epoch, or where the training was stopped."""
        if not self.evaluations.is_done or self.interrupted:
            self.step.after_events()  # as an evaluation does
        if not self.interrupted:
            self.kept_record = {"epoch": number, "step": self.world.step, **self.record}
        if checkpoint:
            self._checkpoint(self.record)
        if self.world.is_first and self.kept_record is not None and shows and not self.interrupted:
            self.folder.add_metrics(self.kept_record)
        before = self.stopped
        if checkpoint and not self.ends_unevaluated:
            self._call("saved", number)
        if self.stopped and not before:
            self._checkpoint()  # with that

    def _evaluate_end(self) -> None:
        """Evaluate a training that ends within an epoch, or where no evaluation was due.

        It is saved by then, since a run that goes on has nothing that the scheduler or callbacks
        make of that.
        """
        number = self.epoch + (self.position > 0)
        for kind in ("log", "epoch") if self.position else ():
            self._call(kind, number, whole=kind == "log")
        values = self._evaluate()
        self.record |= values
        self._call("evaluated", number)
        self.saves.save_best(values)
        if self.world.is_first:
            self.folder.add_metrics({"epoch": number, "step": self.world.step, **self.record})
        self._call("saved", number)

    def _log(self, sums: Sums) -> None:
        """Tell and write down what the steps since the last log came to, with what callbacks add
        to that.
        """
        values: dict[str, float] = {}
        if self.logs is not None:
            sums.read()
            values = self.logs.log(self.paused)
        self.triggers.done(LOG)
        self.stopped = self.callbacks.logged(self.epoch + 1, values) or self.stopped
        if self.step.together:  # others hear of it at the end of the epoch
            self._after_events()

    def _within(self, due: frozenset[str], sums: Sums) -> None:
        """Evaluate and save within an epoch, whose loss so far came to that, as far as it is due.

        An evaluation that is owed is made before the next step of whoever resumes, if the ranks are
        to stop now.
        """
        is_end = self._is_at_last_step or self.position == self.loader.batches_of(self.epoch)
        if is_end or self.step.stopping:
            return
        self.step.check()
        self.partial = sums.read()
        begun, number, values = time.perf_counter(), self.epoch + 1, {}
        if self.evaluations.owed:
            values = self._evaluate()
            self._call("evaluated", number, values)
            if self.world.is_first and values:
                self.folder.add_metrics({"epoch": number, "step": self.world.step, **values})
            self.paused += time.perf_counter() - begun
            self._after_events()
        if SAVE in due or self.stopped or self.saves.is_best(values):
            self._checkpoint(values)

    def _checkpoint(self, values: dict[str, float] | None = None) -> None:
        place = {
            "epoch": self.epoch,
            "position": self.position,
            "step": self.world.step,
            "skipped": self.step.skips.number,
            "partial": (*self.partial, self.partial.parts),
            "record": self.kept_record,
            "data": self.data,
            "stopped": self.stopped,
            "ends_unevaluated": self.ends_unevaluated,
            "owed": self.evaluations.owed,
            "judged": self.evaluations.judged,
            "recent": None if self.logs is None else (*self.logs.recent, self.logs.recent.parts),
        }
        self.saves.save(place, values)
        self.triggers.done(SAVE)

    def _resume(self) -> None:
        state = self.saves.load()
        self.epoch, self.position = state["epoch"], state["position"]
        self.partial = Loss(*state["partial"])
        self.kept_record, self.data = state.get("record"), state.get("data", {})
        self.world.step = state["step"]
        if self.step.together or self.world.is_first:
            self.step.skips.number = state.get("skipped", 0)
        self.stopped = state.get("stopped") or ""
        self.stopped = "on_event" if self.stopped is True else self.stopped  # earlier versions
        self.evaluations.owed, self.evaluations.judged = (
            state.get("owed", False),
            state.get("judged"),
        )
        self.recent = Loss(*(state.get("recent") or self.recent))
        is_beyond = self.job.steps is not None and self.world.step > self.job.steps
        is_beyond = is_beyond or (
            self.epochs is not None and (self.epoch, self.position) > (self.epochs, 0)
        )
        if not is_beyond and (
            self.plan.again
            or not self.world.broadcast_object(has_ended(self.folder, self.world.step))
        ):
            if (
                self.kept_record is not None
            ):  # it may have reached its last step, and not its last file
                self.record = {
                    n: v for n, v in self.kept_record.items() if n not in ("epoch", "step")
                }
            self.ends_unevaluated = state.get("ends_unevaluated", False)
            return
        if self.stopped:
            after = counted(self.epoch, "epoch")
            self.saves.notes.append(f"{self.stopped} had stopped the run after {after}: it goes on")
            self.stopped = ""
        if self._is_at_last_step or self._is_done():
            raise nothing_left(
                self.epoch, self.world.step, None if self._is_at_last_step else self.epochs or 1
            )
