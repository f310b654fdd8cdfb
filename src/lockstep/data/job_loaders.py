"""Which loader goes through a dataset: of a job, by its settings, and for a loop of one's own."""

from __future__ import annotations

import warnings
from typing import Any, Unpack

from lockstep.data.fingerprint import same_on_every_rank
from lockstep.data.loader import AnyLoader, Loader
from lockstep.data.source import is_stream, resolve
from lockstep.data.stream import StreamLoader
from lockstep.job import Job
from lockstep.launch import here
from lockstep.launch.world import World
from lockstep.signatures import LoaderFields, with_fields_of

OF_COLLATE = (
    "not the global batch: padding, mixing and random draws depend on these samples only, so "
    "draws aren't those of one device, and the loss must ignore padding"
)
"""What is logged of a collate that is given a part of a batch."""


@with_fields_of(AnyLoader)
def batches(dataset: Any, batch_size: int, **settings: Unpack[LoaderFields]) -> AnyLoader:
    """Return this process's share of every global batch, for a loop of your own.

    ::

        for inputs, targets in lockstep.batches(dataset, batch_size=256):
            step(inputs, targets)

    Each pass over the result is the next epoch. Inside ``launch``, or under torchrun, it knows the
    rank by itself.

    Args:
        dataset: of ``(inputs, targets)``; one that can only be gone through (a stream) isn't
            shuffled.
        batch_size: samples of the *global* batch.
        **settings: as those of ``lockstep.data.AnyLoader``.

    Raises:
        JobError: a setting is wrong, or the dataset is empty.
    """
    world = here()
    if world is not None and world.size > 1:
        device = None if world.device.is_slot else world.device.torch
        settings = {"rank": world.rank, "world_size": world.size, "device": device, **settings}
        settings.setdefault("shares", world.layout.shares)

        if settings.get("collate") is not None and world.is_first:
            warnings.warn(f"collate gets each device's local batch, {OF_COLLATE}", stacklevel=2)

    dataset = resolve(dataset, world or World(), settings.get("name") or "train_data")
    return _loader(dataset, batch_size=batch_size, **settings)


def _loader(dataset: Any, **settings: Any) -> AnyLoader:
    """Return the loader of a dataset, with settings of ``AnyLoader``."""
    return (StreamLoader if is_stream(dataset) else Loader)(dataset, **settings)


def eval_loaders(job: Job, world: World, sets: dict[str, Any]) -> dict[str, AnyLoader]:
    """Return a loader for each evaluation set, by its name."""
    loaders = {}
    for name, dataset in sets.items():
        field = f'eval_data["{name}"]' if name else "eval_data"
        loaders[name] = job_loader(job, world, dataset, evaluation=True, name=field)

    return loaders


def job_loader(
    job: Job, world: World, dataset: Any, *, evaluation: bool = False, name: str = "train_data"
) -> AnyLoader:
    """Return the loader of this rank's shares of a dataset, with the settings of a job.

    Args:
        job: whose settings they are.
        world: this rank's place. Where it has several devices, each gets its share.
        dataset: as ``resolve`` gives it.
        evaluation: in the dataset's order, in batches of ``eval_batch_size``, whole.
        name: what the dataset is called in messages.

    Raises:
        JobError: the ranks have other data, or a setting is wrong.
    """
    same_on_every_rank(dataset, world, name)
    data = world.data
    several = data.local_batches > 1
    batch_size = job.batch_size
    if evaluation and job.eval_batch_size:
        batch_size = job.eval_batch_size

    return _loader(
        dataset,
        rank=None if several else data.rank,
        world_size=data.local_batches if several else data.size,
        shares=world.layout.shares,
        batch_size=batch_size,
        accumulate=1 if evaluation else job.accumulate,
        seed=job.seed,
        shuffle=job.shuffle and not evaluation,
        order=None if evaluation else job.order,
        batches=None if evaluation else job.batches,
        cut_by=None if evaluation else job.cut_by,
        collate=job.collate,
        workers=job.loader_workers,
        device=[device.torch for device in world.devices],
        evaluation=evaluation,
        name=name,
    )
