"""The batches of a loop of one's own: tensors that nobody but the person knows, cut by their rows.

Where a step cuts a batch, in micro-batches or over the devices of one process, each tensor is asked
for its first dimension::

    the number of samples    a row for each sample: cut
    1                        a row for all samples, which each part gets whole
    none                     a number for all samples
    any other                refused: a batch of as many samples might come, and would be cut by it

A list among the targets that has an item for each sample is cut by its items. Nothing is remembered
of earlier batches, so what a batch means doesn't depend on those before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import Batch, Part, mixed, over_ranks
from lockstep.errors import InputError
from lockstep.launch.world import World
from lockstep.tensors.pytree import named_parts
from lockstep.tensors.rows import are_batches, batch_size_of, cut, holds_samples, share_sizes
from lockstep.tensors.seeding import kept_state_on, seed_on


def batch_of(
    inputs: Any,
    targets: Any,
    accumulate: int,
    world: World,
    refuse_gaps: Callable[[list[bool]], None],
) -> Batch:
    """Return this rank's share, which a loop of one's own gives, as a Batch.

    Every rank calls it, and learns what the others have.

    Args:
        inputs, targets: of this rank's samples; None where it has none.
        accumulate: micro-batches to cut them in.
        world: the ranks.
        refuse_gaps: called with which ranks have samples of a micro-batch, where one has none and a
            later one has.

    Raises:
        InputError: inputs and targets can't be cut together.
    """
    samples = 0 if inputs is None else batch_size_of(inputs)
    if accumulate > 1 or len(world.devices) > 1:
        refuse_uncut(inputs, targets, samples)

    sizes = [theirs for (theirs,) in over_ranks(world, samples)]
    whole = Part(inputs, targets, samples, samples, start=sum(sizes[: world.rank]))
    parts = parts_of(whole, share_sizes(samples, accumulate))
    cuts = [share_sizes(theirs, accumulate) for theirs in sizes]
    for part, shares in zip(parts, zip(*cuts, strict=True), strict=True):
        full = [share > 0 for share in shares]
        number = sum(full)
        if not all(full[:number]):
            refuse_gaps(full)
        # A number below that of the ranks says that some have none; these are the last ones
        # wherever it matters.
        part.of = number if number < world.size else sum(shares)

    return Batch(parts, sum(sizes), 0, 0)


def parts_of(part: Part, sizes: Sequence[int]) -> list[Part]:
    """Cut a part into parts of these sizes, some of which may be empty."""
    nest = (part.inputs, part.targets)
    parts = []
    start = 0
    for size in sizes:
        some: tuple[Any, Any] = (None, None)
        if size == part.size:
            some = nest
        elif size:
            some = cut(nest, start, size, part.size)
        parts.append(Part(*some, size, part.of, start=part.start + start))
        start += size
    return parts


def refuse_uncut(inputs: Any, targets: Any, samples: int) -> None:
    """Refuse a batch that can't be cut in samples, whatever the samples of a later batch are.

    Raises:
        InputError: a tensor has neither a row for each sample nor one for all, or a list of
            targets may be either of two things.
    """
    _refuse_uncut("inputs", inputs, samples)
    _refuse_uncut("targets", targets, samples)


def _refuse_uncut(name: str, nest: Any, samples: int) -> None:
    """Refuse a nest by the way to what is wrong in it: ``targets.boxes``."""
    if isinstance(nest, Tensor):
        if nest.dim() and nest.shape[0] not in (1, samples):
            raise InputError(
                f"{name}: a tensor of shape {tuple(nest.shape)} cannot be cut into {samples} "
                "samples: the first dimension must be the batch (batch_first=True, or transpose "
                "inside of the model), or 1 where all samples share the tensor"
            )
        return

    if isinstance(nest, list | tuple) and holds_samples(nest, samples):
        return
    is_list_of_targets = name.startswith("targets") and type(nest) is list
    if is_list_of_targets and len(nest) == samples > 1 and are_batches(nest, samples):
        raise InputError(
            f"{name}: a list of {samples} items with {samples} rows each is ambiguous for "
            f"{samples} samples: pass several targets of all samples as a tuple, and targets of "
            "each sample as a list of dictionaries"
        )

    for key, part in named_parts(nest):
        _refuse_uncut(f"{name}.{key}", part, samples)


@contextlib.contextmanager
def own_stream(world: World, seed: int) -> Iterator[None]:
    """Give this rank random numbers of its own for a step.

    A script seeds all ranks alike, so that they agree on what it draws; masks must differ all the
    same.
    """
    if world.size == 1:
        yield
        return

    mine = mixed(seed, world.step + 1, world.rank)
    with contextlib.ExitStack() as kept:
        for device in {torch.device("cpu"), *(device.torch for device in world.devices)}:
            kept.enter_context(kept_state_on(device))
            seed_on(device, mine)
        yield
