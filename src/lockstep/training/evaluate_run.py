"""``evaluate``: the loss and the metrics of a run, or of an untrained job."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data import eval_loaders, resolve_sets
from lockstep.errors import InputError, JobError
from lockstep.job import Job
from lockstep.jobfile import AnyJob, JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Devices
from lockstep.launch.placement import on_devices
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.run.terminal import Display
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.training.evaluation import evaluate_sets, say_what_collates
from lockstep.training.run import Run, trained_of


@dataclass(frozen=True)
class _Evaluation:
    """What each rank is given for an evaluation."""

    job: Job | JobFile
    strategy: Strategy
    weights: Path | None


def evaluate(
    what: Run | AnyJob,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    best: bool = False,
    weights: str | Path | None = None,
    job_parameters: Mapping[str, Any] | None = None,
    job: AnyJob | None = None,
    trust_job: bool = False,
    **settings: Any,
) -> dict[str, float]:
    """Evaluate a run's weights, or an untrained job, on the job's evaluation set.

    Args:
        what: a Run or the path of its folder; a Job or the path of a job file.
        strategy: as in ``train``; the values are the same under any.
        devices: as in ``train``.
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
    if isinstance(what, Run) or (isinstance(what, str | Path) and not _is_job_file(what)):
        evaluated, file = trained_of(
            what,
            best=best,
            weights=weights,
            job_parameters=job_parameters,
            job=job,
            trust=trust_job,
        )
    else:
        for option, value in {"best": best, "weights": weights, "job": job}.items():
            if value:
                raise InputError(
                    f"{what}: --{option} is for a run, and this is a job that was not trained: "
                    f"--init {weights or 'FILE'} gives it weights"
                )
        evaluated = as_job(what, job_parameters)

    evaluated = with_settings(evaluated, {"eval_batches": None, **settings}, evaluate)
    chosen = _devices.parse(devices_for(strategy, devices))
    plan = _Evaluation(evaluated, choose(strategy, chosen), file)
    with Display() as display:
        return on_devices(evaluate_on, plan, chosen, None, display)


def _is_job_file(path: str | Path) -> bool:
    return Path(path).suffix == ".py" and not os.path.isdir(path)


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
    values = evaluate_sets(step, loaders, job, checks=True, most=job.eval_batches)
    for loader in loaders.values():
        loader.close()
    return values
