"""Whether data are the same: on every rank, and as when a run was begun, as far as a few samples
tell.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from lockstep.data.fetch import Collate, Fetcher, base_of, lookup_of, number_of
from lockstep.data.shares import Batch
from lockstep.data.source import is_stream
from lockstep.errors import JobError
from lockstep.launch.world import World
from lockstep.tensors.pytree import holds_packed
from lockstep.tensors.rows import cut

_LOOKED_AT = 1000
"""Indices and rows by which the data of ranks are compared."""


def same_on_every_rank(dataset: Any, world: World, name: str) -> None:
    """Make sure that all ranks have the same data, as far as that shows without asking a dataset
    for samples.

    A dataset of a class of one's own is only compared by its length: fetching would open files
    before loader workers are made. Streams are compared while they are read.

    Raises:
        JobError: they haven't; every rank raises.
    """
    if world.size == 1 or is_stream(dataset):
        return
    (length, number), *others = world.gather_objects((len(dataset), _number(dataset)))
    for rank, (other_length, other) in enumerate(others, start=1):
        if other_length != length:
            raise JobError(
                f"{name}: it has {length} samples on rank 0 and {other_length} on rank {rank}: "
                "every rank needs the whole dataset (don't cut it by rank)"
            )
        if other != number:
            raise JobError(
                f"{name}: the samples on rank {rank} differ from those on rank 0",
                kind="unseeded data",
                fix="seed the code that makes or splits them (random_state=0 in scikit-learn, "
                "default_rng(0) in numpy)",
            )


def _number(dataset: Any) -> int:
    """Return a number made of some indices of a ``Subset`` and of some rows of tensors."""
    made: list[Any] = []
    lookup = lookup_of(dataset)
    if lookup is not None:
        made.append(lookup[:_LOOKED_AT])
    base = base_of(dataset)
    if type(base) is TensorDataset:
        for tensor in base.tensors:
            made.append(tensor[:: max(1, len(tensor) // _LOOKED_AT)][:_LOOKED_AT])

    return number_of(made)


def fingerprint(batch: Batch, samples: int | None, collate: Collate | None) -> dict[str, Any]:
    """Return the number of samples, and a number made of the first one of a batch that was
    fetched anyway.

    A collate of a person's own may make other rows of a sample in each batch, so then there is no
    such number.

    Args:
        batch: of this process.
        samples: the number of all samples; None for a stream, whose samples aren't kept.
        collate: the job's.
    """
    if samples is None:
        return {}
    found: dict[str, Any] = {"samples": samples}
    if collate is not None:
        return found
    for share in batch.shares or [batch.parts]:
        for part in share:
            pair = part.inputs, part.targets
            if part.size and part.samples is not None and not holds_packed(pair):
                found["sample"] = int(part.samples[0])
                found["epoch"] = batch.epoch
                found["number"] = number_of(cut(pair, 0, 1, part.size))
                return found

    return found


def change_of(before: dict[str, Any], dataset: Any, *, seed: int, name: str) -> str | None:
    """Return what is other than it was, in a line; None where nothing is."""
    if not before or is_stream(dataset):
        return None
    if before["samples"] != len(dataset):
        return (
            f"{name} has {len(dataset):,} samples, and had {before['samples']:,} when the run "
            "was started: the batches are different now"
        )

    if "number" not in before:
        return None
    index = before["sample"]
    numbers = []
    for _ in range(2):
        (pair,) = Fetcher(dataset, seed=seed)(before["epoch"], [[index]])
        numbers.append(number_of(pair))

    # A sample that is other each time tells nothing.
    if before["number"] in numbers or numbers[0] != numbers[1]:
        return None
    return f"{name} has changed since the run was started: sample {index} is different"
