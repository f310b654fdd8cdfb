"""Loaders with the settings of a job."""

from __future__ import annotations

from typing import Any

from lockstep.data.loader import AnyLoader, loader_of
from lockstep.job import Job
from lockstep.launch.world import World


def eval_loaders(job: Job, world: World, sets: dict[str, Any]) -> dict[str, AnyLoader]:
    """A loader for each evaluation set, by its name."""
    return {
        name: job_loader(job, world, dataset, evaluation=True, name=f'eval_data["{name}"]' if name else None)
        for name, dataset in sets.items()
    }


def job_loader(job: Job, world: World, dataset: Any, *, evaluation: bool = False, name: str | None = None) -> AnyLoader:
    """The loader of this rank's shares of a dataset, with the settings of a job.

    Args:
        job: whose settings they are.
        world: this rank's place.
        dataset: as ``resolve`` gives it.
        evaluation: in the dataset's order, in batches of ``eval_batch_size``, whole.
        name: what the dataset is called in messages.
    """
    several = len(world.devices) > 1
    # A strategy that drives several accelerators itself sends each its share; the loader leaves the batch where it is.
    device = None if several or world.device.is_slot else world.device.torch
    return loader_of(
        dataset,
        *world.data,
        batch_size=(job.eval_batch_size or job.batch_size) if evaluation else job.batch_size,
        accumulate=1 if evaluation else job.accumulate,
        seed=job.seed,
        shuffle=job.shuffle and not evaluation,
        order=None if evaluation else job.order,
        collate=job.collate,
        workers=job.loader_workers,
        device=device,
        evaluation=evaluation,
        name=name,
    )
