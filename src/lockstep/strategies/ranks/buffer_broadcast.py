"""Buffers of the ranks of ``ddp`` and ``fsdp``, which follow those of the first rank."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.build import buffers_of
from lockstep.model.modes import NORMS
from lockstep.model.snapshot import same

Place = tuple[nn.Module, str]
"""A module, and the name of a buffer of it."""


class FollowedBuffers:
    """Buffers that change in training and act in it: all ranks follow rank 0, as with PyTorch's own
    DDP.

    BatchNorm's running statistics only act in evaluation, so they are shared then, and when a
    person puts a layer in evaluation mode. The others are found by looking which have changed on
    any rank, after steps 1, 2, 4, 8, ... and at each evaluation. Constants (masks, positions) are
    never sent. Values are compared, since a version counter misses what kernels write.

    Args:
        model: this rank's.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._norms = [m for m in model.modules() if isinstance(m, NORMS)]
        self._still: set[nn.Module] = set()  # norms in evaluation mode
        self._changing: list[Place] = []
        self._unchanged: dict[Place, torch.Tensor] = {}
        if world.size == 1:
            return
        for module, name in buffers_of(model):
            if isinstance(module, NORMS):
                continue
            buffer = module.get_buffer(name)
            self._unchanged[module, name] = buffer.clone()

    def follow(self) -> None:
        """Take rank 0's values of buffers that change, and of norms that were put in evaluation
        mode.
        """
        if self._world.size == 1:
            return
        still = [norm for norm in self._norms if not norm.training]
        before = self._still
        self._still = set(still)
        if self._still - before:
            self._world.meet("a change of the model (a batch norm is in evaluation mode now)")
            for norm in still:
                take_first(self._world, buffers_of(norm))
        take_first(self._world, self._changing)

    def look(self) -> None:
        """Find buffers that have changed; every rank calls this at the same time."""
        if not self._unchanged:
            return
        changed = []
        for (module, name), before in self._unchanged.items():
            now = module._buffers[name]
            changed.append(not same(now, before))
        device = self._world.device.torch
        flags = torch.tensor(changed, dtype=torch.float32, device=device)
        ranks = self._world.all_reduce(flags).tolist()
        found = list(itertools.compress(self._unchanged, ranks))
        for place in found:
            del self._unchanged[place]
        self._changing += found


def take_first(world: World, places: list[Place]) -> None:
    """Overwrite buffers with rank 0's, which may have got another shape.

    Every rank calls this. A buffer that is None on this rank or on rank 0 stays as it is.
    """
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    given = []
    if world.is_first:
        given = [None if buffer is None else buffer.cpu() for buffer in mine]
    of_first = world.broadcast_object(given)
    if world.is_first:
        return
    for (module, name), buffer, first in zip(places, mine, of_first, strict=True):
        if buffer is None or first is None:
            continue
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module._buffers[name] = first.to(buffer.device)
