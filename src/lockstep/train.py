"""``train`` and ``evaluate``: a job, a strategy by name, the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data import eval_loaders, is_stream, resolve_sets
from lockstep.errors import (
    FolderError,
    InputError,
    JobError,
    LockstepError,
    Lost,
    StrategyError,
    told,
)
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank, started_ranks
from lockstep.launch import world as _world
from lockstep.launch.devices import Device, Devices
from lockstep.launch.lost_ranks import LostRanks
from lockstep.launch.placement import check_backend, needs_one_process, on_devices
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.stop_request import GRACE, StopRequest
from lockstep.launch.terminal import Display
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.training.evaluation import evaluate_sets, say_what_collates, try_out
from lockstep.training.loop import train_on
from lockstep.training.resume import as_it_went, run_to_resume
from lockstep.training.run import Run, trained_of
from lockstep.training.setup import Plan


def train(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = None,
    resume: str | Path | None = None,
    folder: str | Path = "runs",
    backend: str | None = None,
    profile: bool = False,
    quiet: bool = False,
    audit: bool = False,
    grace: float = GRACE,
    restarts: int = 0,
    min_devices: int | None = None,
    timeout: float = 1800.0,
    batch_size_per_device: int | None = None,
    **settings: Any,
) -> Run:
    """Train a job.

    Args:
        job: a Job, a function that returns one, or the path of a job file.
        strategy: by name; None takes ``single`` on one device and ``ddp`` on several.
        devices: as in ``lockstep.launch.devices``: ``"auto"``, 4, ``"2xcpu"``, ``"cuda:0,2"``; None
            is ``"auto"``.
        resume: the folder of a run to resume, under any strategy and number of devices. Where these
            are None it resumes under its own strategy, with the settings of that strategy, and on
            its devices as far as they are here. ``"auto"`` is the newest run of this job under
            ``folder`` that isn't at its end, or a new one. Ranks that torchrun has started again
            resume their run by themselves.
        folder: where the run's folder is made.
        backend: of the process group, instead of the devices' own.
        profile: profile a few steps: a trace for each rank, and a table of where the time goes
            (docs/profile.md).
        quiet: print nothing.
        audit: write down the samples of each step, for ``lockstep audit`` (see
            lockstep.training.audit).
        grace: seconds allowed for the current step to finish after Ctrl-C or SIGTERM.
        restarts: how many times ranks of this machine that were lost are started again, from the
            last checkpoint.
        min_devices: the smallest number of devices to resume with, where a rank is lost twice
            without coming further.
        timeout: seconds without progress after which the run ends; 0 is never. Which rank the
            others wait for is reported after 30 s, or ten usual steps (see
            lockstep.launch.hang_report).
        batch_size_per_device: samples that each replica of the model computes at once;
            ``batch_size`` is that times the replicas, times ``accumulate``.
        settings: fields of the job to replace.

    Raises:
        InputError: something asked for can't be done; nothing was made.
        RunError: the run failed; its folder is kept. What the job's own code raises in another
            process comes as a RankFailed with that as its cause; in this process, as itself.
        KeyboardInterrupt: Ctrl-C; the run is saved as it was at the end of that step, and can be
            resumed.
        SystemExit: SIGTERM, or SIGUSR1; likewise, with 143.
    """
    _world.not_within_a_rank()
    job = with_settings(as_job(job), settings)
    if batch_size_per_device is not None:
        _check_batch_size_per_device(batch_size_per_device, job, settings)

    torchrun = started_as_rank()
    # Rank 0 makes the folder and has the display; the others hear of the folder when all have met.
    first = not torchrun or started_ranks.place().rank == 0
    name = job.name if isinstance(job, JobFile) else "job"

    with Display(quiet=quiet or not first) as display:
        find = functools.partial(run_to_resume, resume, folder, job, name)
        found = started_ranks.read_by_first(find) if torchrun else find()
        if found.config is not None:
            strategy, devices = as_it_went(
                found.config, strategy, devices, own_devices=not torchrun
            )

        chosen = _devices.parse(devices_for(strategy, devices))
        check_backend(backend, chosen)
        planned = choose(strategy, () if torchrun else chosen)
        _check_restarts(planned, chosen, restarts, min_devices, torchrun=torchrun)
        lost = LostRanks(restarts, min_devices, chosen)

        run: RunFolder | None = None
        if found.folder is not None:
            run = RunFolder(found.folder)
        elif first:
            run = RunFolder.new(folder, f"{name}-{planned.name}")
        place = None if run is None else str(run.path.resolve())

        plan = Plan(
            job=job,
            strategy=planned,
            name=name,
            folder=place,
            resume=found.config is not None,
            profile=profile,
            audit=audit,
            timeout=timeout,
            batch_size_per_device=batch_size_per_device,
            again=found.again,
        )
        if found.folder is not None and (found.again or resume == "auto"):
            how = "resuming" if plan.resume else "beginning again in"
            display.line(f"{how} {found.folder}")

        restarted = None if torchrun else run
        try:
            with StopRequest(_has_begun, grace) as request:
                summary, path = _with_restarts(plan, chosen, backend, display, restarted, lost)
            if not summary:
                request.raise_if_asked()
        except BaseException as error:
            if run is not None and first:
                _after_error(run, error, display, resumed=plan.resume)
            raise

        run = run or RunFolder(path)
        display.line(f"run: {run.path}")
        return Run(run.path, summary, job)


def _check_batch_size_per_device(
    size: int, job: Job | JobFile, settings: Mapping[str, Any]
) -> None:
    """Refuse a ``batch_size_per_device`` beside a ``batch_size``, or below 1."""
    given = dict(settings)
    if isinstance(job, JobFile):
        given |= job.settings
    what = str(size)
    if "batch_size" in given:
        what += f" and batch_size {given['batch_size']}"
    elif size >= 1:
        return

    raise InputError(f"batch_size_per_device: {what}: give one of them, from 1")


def _check_restarts(
    strategy: Strategy,
    devices: tuple[Device, ...],
    restarts: int,
    min_devices: int | None,
    *,
    torchrun: bool,
) -> None:
    """Refuse a strategy, and restarts, that the way of starting the ranks doesn't allow."""
    name = strategy.name
    if torchrun and strategy.in_one_process:
        raise StrategyError(
            f"{name} is one process for all devices, and torchrun starts one for each: take ddp"
        )
    if min_devices is not None and strategy.devices_needed is not None:
        raise InputError(
            f"min_devices: {name} is for {strategy.devices_needed} devices, and no fewer: "
            "leave it out"
        )

    if restarts and torchrun:
        raise InputError("restarts: torchrun has --max-restarts")
    if restarts and needs_one_process(strategy, devices):
        raise InputError(
            f"restarts: {name} is one process here: start the command again, with --resume auto"
        )


_NEVER = 1e7
"""Seconds that collectives wait where the run is never ended."""


def _with_restarts(
    plan: Plan,
    devices: tuple[Device, ...],
    backend: str | None,
    display: Display,
    run: RunFolder | None,
    lost: LostRanks,
) -> tuple[dict[str, Any], str]:
    """Train, and resume when ranks are lost; ``run`` is None where others start them again."""
    before = None if run is None else run.written_at(run.summary)
    # A collective waits longer, so that the report of who has not arrived comes first.
    longest = plan.timeout + 60 if plan.timeout else _NEVER

    while True:
        try:
            return on_devices(train_on, plan, devices, backend, plan.folder, display, longest)
        except Lost as error:
            if run is None:
                raise
            if run.written_at(run.summary) not in (None, before):
                # All that the run leaves is written: what was lost had nothing more to do.
                display.line(f"note: {error}, after the end")
                return run.read_json(run.summary), str(run.path)
            devices, line = lost.after(error, run)
            display.line(line)
            plan = dataclasses.replace(plan, resume=run.is_resumable, again=True)


def _has_begun() -> bool:
    """Return whether this process has made an update, and not only begun with one."""
    world = _world.current()
    return world is not None and world.step > 1


def _after_error(run: RunFolder, error: BaseException, display: Display, *, resumed: bool) -> None:
    """Remove the folder of a run that was refused, or was stopped before it had anything.

    Else log where it is, and write what failed.
    """
    is_stopped = not isinstance(error, Exception)
    is_refused = isinstance(error, InputError)
    if not resumed and not run.is_resumable and (is_refused or is_stopped):
        run.remove()
        if is_stopped:
            display.line("nothing was saved yet, so no run is kept")
        return

    if is_refused and (resumed or not run.is_resumable):
        return
    if not is_stopped:
        text = told(error)
        if isinstance(error, LockstepError):
            text = str(error).partition("\n")[0]
        with contextlib.suppress(FolderError):  # a full disk, say, which was reported already
            run.write_json(run.failure, {"error": text})

    how = f"; resume it with --resume {run.path}" if run.is_resumable else ""
    display.line(f"run: {run.path}{how}")


@dataclass(frozen=True)
class _Evaluation:
    """What each rank is given for an evaluation."""

    job: Job | JobFile
    strategy: Strategy
    weights: Path | None


def evaluate(
    what: Run | Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    backend: str | None = None,
    best: bool = False,
    weights: str | Path | None = None,
    job_parameters: Mapping[str, Any] | None = None,
    job: Job | JobFile | Callable[[], Job] | str | Path | None = None,
    trust_job: bool = False,
    **settings: Any,
) -> dict[str, float]:
    """Evaluate a run's weights, or an untrained job, on the job's evaluation set.

    Args:
        what: a Run or the path of its folder; a Job or the path of a job file.
        strategy: as in ``train``; the values are the same under any.
        devices: as in ``train``.
        backend: as in ``train``.
        best: take the weights of the best evaluation.
        weights: take another safetensors file of a run: in its folder (``"ema.safetensors"``), or
            else by its path.
        job_parameters: keyword arguments for the function of a job file.
        job: of a run, instead of the job file that its folder names.
        trust_job: take the job file that a run's folder names, though it isn't the one that was
            trained.
        settings: fields of the job to replace.

    Returns:
        ``"loss"`` and each metric, each sample counted once. Evaluation sets by name give
        ``"clean/loss"`` and so on; ``"loss"`` is then that of the first.
    """
    file: Path | None = None
    if isinstance(what, Run) or (isinstance(what, str | Path) and os.path.isdir(what)):
        evaluated, file = trained_of(
            what,
            best=best,
            weights=weights,
            job_parameters=job_parameters,
            job=job,
            trust=trust_job,
        )
    else:
        for option, value in (("best", best or None), ("weights", weights), ("job", job)):
            if value is not None:
                instead = f": --init {weights} gives it these" if option == "weights" else ""
                raise InputError(
                    f"{what}: --{option} is for a run, and this is a job that was not trained"
                    f"{instead}"
                )
        is_path = isinstance(what, str | Path)
        evaluated = JobFile(str(what), job_parameters or {}) if is_path else as_job(what)

    evaluated = with_settings(evaluated, settings)
    chosen = _devices.parse(devices_for(strategy, devices))
    check_backend(backend, chosen)
    plan = _Evaluation(evaluated, choose(strategy, chosen), file)
    with Display() as display:
        return on_devices(evaluate_on, plan, chosen, backend, None, display)


def evaluate_on(world: World, plan: _Evaluation) -> dict[str, float]:
    """Evaluate on this rank; the values are the same on every rank."""
    job = the_job(plan.job)
    if job.eval_data is None:
        raise JobError("eval_data: the job has none, so there is nothing to evaluate on")
    if plan.weights is not None:
        job = job.replace(model=functools.partial(trained_model, job, plan.weights), init=None)
    step = plan.strategy.prepare(job, world)
    sets = resolve_sets(job.eval_data, world)
    loaders = eval_loaders(job, world, sets)
    say_what_collates(job, step)
    if not any(map(is_stream, sets.values())):
        try_out(step, loaders, job.metrics, world, job.seed)
    values = evaluate_sets(step, loaders, job.metrics, world, job.seed, checks=True)
    for loader in loaders.values():
        loader.close()
    return values
