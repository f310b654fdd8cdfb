"""Rates: how many times a job's scheduler has moved, by the learning rates it gives."""

from __future__ import annotations

import warnings

from lockstep.errors import LockstepError
from lockstep.jobfile import the_job, with_settings
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.optimizer import build_optimizer
from lockstep.strategies.single import SingleStep
from lockstep.training.scheduler import scheduler_of
from lockstep.verify.experiment import Experiment


def moves_of(experiment: Experiment, rates: tuple[float, ...], *, most: int) -> int | None:
    """After how many moves the job's scheduler gives these learning rates; None where it isn't found to.

    Args:
        experiment: with the job.
        rates: group by group.
        most: moves to look at.
    """
    job = the_job(with_settings(experiment.job, experiment.settings))
    world = World(devices=experiment.devices[:1])
    try:
        model = build_model(job, world, place=False)
        step = SingleStep(model, build_optimizer(job, model), job, world)
        scheduler = scheduler_of(job, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no update is made in between, on purpose
            for moves in range(most + 1):
                now = [float(group["lr"]) for group in step.optimizer.param_groups]
                if all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(now, rates, strict=True)):
                    return moves
                scheduler.step()
    except (LockstepError, TypeError, AttributeError):  # a scheduler that wants to see losses, say
        return None
    return None
