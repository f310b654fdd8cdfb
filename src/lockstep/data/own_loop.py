"""What a loop of one's own gives to a step: this rank's inputs and targets, made the share of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.data.shares import Batch, Part, mixed, over_ranks
from lockstep.errors import InputError
from lockstep.launch.world import World
from lockstep.tensors.pytree import batch_size_of, cut, share_sizes, tensors


def batch_of(
    inputs: Any, targets: Any, accumulate: int, world: World, refuse_gaps: Callable[[list[bool]], None]
) -> Batch:
    """This rank's share as a Batch. Every rank calls it, and learns what the others have.

    Args:
        inputs: of this rank's samples; None where it has none.
        targets: of the same.
        accumulate: micro-batches to cut them in.
        world: the ranks.
        refuse_gaps: called with which ranks have samples of a micro-batch, where one has none and a later one has.

    Raises:
        InputError: inputs and targets can't be cut together.
    """
    mine = 0 if inputs is None else batch_size_of(inputs)
    if accumulate > 1 or len(world.devices) > 1:
        _refuse_other_rows(mine, targets)
    sizes = [size for (size,) in over_ranks(world, mine)]
    parts = []
    start = 0
    for size in share_sizes(mine, accumulate):
        part_inputs, part_targets = cut((inputs, targets), start, size, mine) if size < mine else (inputs, targets)
        parts.append(Part(part_inputs, part_targets, size, size) if size else Part(None, None, 0, 0))
        start += size
    if world.size > 1:
        every = [share_sizes(s, accumulate) for s in sizes]
        for i, part in enumerate(parts):
            here = [shares[i] > 0 for shares in every]
            # Fewer than there are ranks says that some have none; these are the last ones wherever it matters.
            part.of = sum(shares[i] for shares in every) if all(here) else sum(here)
            if not all(here[: sum(here)]):
                refuse_gaps(here)
    return Batch(parts, sum(sizes), 0, 0, None)


def _refuse_other_rows(rows: int, targets: Any) -> None:
    """Refuse what would be cut along another dimension than the batch: sequence-first inputs, say."""
    theirs = [t.shape[0] for t in tensors(targets) if t.dim()]
    if rows and theirs and rows not in theirs:
        raise InputError(
            f"inputs have {rows} rows and targets {theirs[0]}, so they can't be cut together: the first dimension of "
            "both has to be the batch (batch_first=True, or transpose inside of the model)"
        )


@contextmanager
def own_stream(world: World, seed: int) -> Iterator[None]:
    """Random numbers of this rank's own for a step.

    A script seeds all ranks alike, so that they agree on what it draws; masks must differ all the same.
    """
    if world.size == 1:
        yield
        return
    mine = mixed(seed, world.step + 1, world.rank)
    cards = [world.device.index] if world.device.type == "cuda" else []
    with torch.random.fork_rng(cards):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)):
            generator.manual_seed(mine)
        yield
