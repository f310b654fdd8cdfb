"""``train``: a job, a strategy by name, the devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

from lockstep.job import Job
from lockstep.jobfile import AnyJob, JobFile, as_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank, started_ranks
from lockstep.launch import world as _world
from lockstep.launch.devices import Devices
from lockstep.run.run_folder import RunFolder
from lockstep.run.stop_request import GRACE, StopRequest
from lockstep.run.terminal import Display
from lockstep.signatures import JobFields, with_fields_of
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.training.restarts import after_error, check_restarts, with_restarts
from lockstep.training.resume import as_it_went, run_to_resume
from lockstep.training.run import Run
from lockstep.training.setup import Plan


@with_fields_of(Job, defaults=False)
def train(
    job: AnyJob,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = None,
    set: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    folder: str | Path = "runs",
    profile: bool = False,
    quiet: bool | Literal["notes"] = False,
    audit: bool = False,
    grace: float = GRACE,
    restarts: int = 0,
    timeout: float = 1800.0,
    **settings: Unpack[JobFields],
) -> Run:
    """Train a job.

    Args:
        job: a Job, a function that returns one, or the path of a job file.
        strategy: by name; None takes ``single`` on one device and ``ddp`` on several.
        devices: as in ``lockstep.launch.devices``: ``"auto"``, 4, ``"2xcpu"``, ``"cuda:0,2"``; None
            is ``"auto"``.
        set: arguments of the job function, as the command's ``--set``: ``set={"lr": 0.05}``.
        resume: the folder of a run to resume, under any strategy and number of devices. Where these
            are None it resumes under its own strategy, with the settings of that strategy, and on
            its devices as far as they are here. ``"auto"`` is the newest run of this job under
            ``folder`` that isn't at its end, or a new one. Ranks that torchrun has started again
            resume their run by themselves.
        folder: where the run's folder is made.
        profile: profile a few steps: a trace for each rank, and a table of where the time goes.
        quiet: print nothing; ``"notes"``: only notes, on standard error.
        audit: write down the samples of each step, for ``lockstep audit`` (see
            lockstep.training.records.audit).
        grace: seconds allowed for the current step to finish after Ctrl-C or SIGTERM.
        restarts: how many times ranks of this machine that were lost are started again, from the
            last checkpoint.
        timeout: seconds without progress after which the run ends; 0 is never. Which rank the
            others wait for is reported after 30 s, or ten of the longest pauses so far (see
            lockstep.launch.hang_report).
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
    job = with_settings(as_job(job, set), settings, train)
    torchrun = started_as_rank()
    # Rank 0 makes the folder and has the display; the others hear of the folder when all have met.
    first = not torchrun or started_ranks.place().rank == 0
    name = job.name if isinstance(job, JobFile) else "job"

    with Display(quiet=not first or quiet) as display:
        find = functools.partial(run_to_resume, resume, folder, job, name)
        found = started_ranks.read_by_first(find) if torchrun else find()
        if found.config is not None:
            strategy, devices = as_it_went(
                found.config, strategy, devices, own_devices=not torchrun
            )

        chosen = _devices.parse(devices_for(strategy, devices))
        planned = choose(strategy, () if torchrun else chosen)
        check_restarts(planned, chosen, restarts, torchrun=torchrun)

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
            again=found.again,
        )
        if found.folder is not None and (found.again or resume == "auto"):
            how = "resuming" if plan.resume else "beginning again in"
            display.line(f"{how} {found.folder}")

        restarted = None if torchrun else run
        try:
            with StopRequest(_has_begun, grace) as request:
                summary, path = with_restarts(plan, chosen, display, restarted, restarts)
            if not summary:
                request.raise_if_asked()
        except BaseException as error:
            if run is not None and first:
                after_error(run, error, display, resumed=plan.resume)
            raise

        run = run or RunFolder(path)
        display.line(f"run: {run.path}")
        return Run(run.path, summary, job)


def _has_begun() -> bool:
    """Return whether this process has made an update, and not only begun with one."""
    world = _world.current()
    return world is not None and world.step > 1
