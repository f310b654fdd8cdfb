"""What a rank without samples computes: a sample of the first rank, so that it comes to each block.

It must leave nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.launch.world import World
from lockstep.model.build import buffers_of
from lockstep.strategies.sums.reference_modes import known_in_evaluation_mode
from lockstep.tensors.pytree import to_device


def stand_in_for(part: Part, world: World) -> Part | None:
    """Return the first rank's samples on a rank that has none; None where it has some.

    Every rank calls this.

    Args:
        part: this rank's share of a micro-batch.
        world: the ranks.
    """
    if part.of >= world.size:
        return None
    given: Any = None
    if world.is_first:  # by way of the CPU, else the others would unpack it on this rank's device
        given = to_device((part.inputs, part.targets, part.size), torch.device("cpu"))
    inputs, targets, size = world.broadcast_object(given)
    if part.size:
        return None
    return Part(inputs, targets, size, part.of)


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Compute a sample of another rank in this context; buffers get their earlier values at its end.

    Batch norms take no statistics meanwhile.
    """
    kept = []
    for module, name in buffers_of(model):
        buffer = module.get_buffer(name)
        kept.append((module, name, buffer, buffer.clone()))
    try:
        with known_in_evaluation_mode(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer.copy_(before)
