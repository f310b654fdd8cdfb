"""Buffers that change in training and act in it, the same on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.build import buffers_of


class FollowedBuffers:
    """Buffers that change in training and act in it: all ranks follow rank 0, as with PyTorch's own DDP.

    BatchNorm's running statistics only act in evaluation, so they are shared then. The others are found by looking,
    after steps 1, 2, 4, 8, ... and at each evaluation, which have changed on any rank; constants (masks, positions) are
    never sent. Values are compared, since a version counter misses what kernels write.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._unchanged: dict[tuple[nn.Module, str], torch.Tensor] = {}
        if world.size > 1:
            self._unchanged = {
                (module, name): buffer.clone()
                for module, name in buffers_of(model)
                if (buffer := module._buffers[name]) is not None
                and not isinstance(module, nn.modules.batchnorm._NormBase)
            }
        self._changing: list[tuple[nn.Module, str]] = []

    def follow(self) -> None:
        """Take rank 0's values of those that are known to change."""
        take_first(self._world, self._changing)

    def look(self) -> None:
        """Find those that have changed; every rank calls this at the same time."""
        if not self._unchanged:
            return
        changed = [not _same(module._buffers[name], before) for (module, name), before in self._unchanged.items()]
        flags = torch.tensor(changed, dtype=torch.float32, device=self._world.device.torch)
        anywhere = self._world.all_reduce(flags).tolist()
        found = [place for place, times in zip(self._unchanged, anywhere, strict=True) if times]
        for place in found:
            del self._unchanged[place]
        self._changing += found


def take_first(world: World, places: list[tuple[nn.Module, str]]) -> None:
    """Overwrite these buffers with rank 0's, which may have come to be of another shape."""
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    forms = world.gather_objects(
        [None if b is None else (tuple(b.shape), str(b.dtype), b.is_contiguous()) for b in mine]
    )
    for (module, name), buffer, *theirs in zip(places, mine, *forms, strict=True):
        if buffer is None or None in theirs:
            continue
        # Decided by what all ranks know, so that all of them take the same way.
        plain = buffer.dtype in (torch.float32, torch.float64, torch.int64) and buffer.is_contiguous()
        if plain and len(set(theirs)) == 1:
            world.broadcast(buffer)
            continue
        first = world.broadcast_object(buffer.cpu())
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module._buffers[name] = first.to(buffer.device)


def _same(buffer: torch.Tensor | None, before: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == before.shape and torch.equal(buffer, before)
