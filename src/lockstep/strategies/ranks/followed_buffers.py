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
            if not isinstance(module, NORMS):
                self._unchanged[module, name] = module.get_buffer(name).clone()

    def follow(self) -> None:
        """Take rank 0's values of buffers that change, and of norms that were put in evaluation
        mode.
        """
        if self._world.size == 1:
            return
        before = self._still
        self._still = {norm for norm in self._norms if not norm.training}
        if self._still - before:
            self._world.meet("a change of the model (a batch norm is in evaluation mode now)")
            for norm in self._norms:
                if norm in self._still:
                    take_first(self._world, buffers_of(norm))
        take_first(self._world, self._changing)

    def look(self) -> None:
        """Find buffers that have changed; every rank calls this at the same time."""
        if not self._unchanged:
            return
        changed = []
        for (module, name), before in self._unchanged.items():
            changed.append(not same(module._buffers[name], before))
        flags = torch.tensor(changed, dtype=torch.float32, device=self._world.device.torch)
        anywhere = self._world.all_reduce(flags).tolist()
        for place in list(itertools.compress(self._unchanged, anywhere)):
            del self._unchanged[place]
            self._changing.append(place)


def take_first(world: World, places: list[Place]) -> None:
    """Overwrite buffers with rank 0's, which may have got another shape."""
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    forms = world.gather_objects([_form(buffer) for buffer in mine])
    for (module, name), buffer, *theirs in zip(places, mine, *forms, strict=True):
        if buffer is None or None in theirs:
            continue
        # All ranks know the forms of all, so they take the same way.
        if _is_plain(buffer) and len(set(theirs)) == 1:
            world.broadcast(buffer)
            continue
        first = world.broadcast_object(buffer.cpu())
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module._buffers[name] = first.to(buffer.device)


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether a buffer can be broadcast as it is."""
    sent = (torch.float32, torch.float64, torch.int64)
    return buffer.dtype in sent and buffer.is_contiguous()


def _form(buffer: torch.Tensor | None) -> tuple[tuple[int, ...], str, bool] | None:
    if buffer is None:
        return None
    return tuple(buffer.shape), str(buffer.dtype), buffer.is_contiguous()
