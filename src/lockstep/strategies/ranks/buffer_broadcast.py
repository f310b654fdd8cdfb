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


_SENT = (torch.float32, torch.float64, torch.int64)
"""Number formats of buffers that are broadcast as they are."""


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

    Every rank calls this. A buffer that is None on any rank stays as it is.
    """
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    by_rank = world.gather_objects([_form(buffer) for buffer in mine])
    by_buffer = zip(*by_rank, strict=True)
    for place, buffer, forms in zip(places, mine, by_buffer, strict=True):
        if buffer is None or None in forms:
            continue
        # All ranks know the forms of all, so they take the same way.
        are_alike = len(set(forms)) == 1
        if are_alike and _is_plain(buffer):
            world.broadcast(buffer)
            continue
        first = world.broadcast_object(buffer.cpu())
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module, name = place
            module._buffers[name] = first.to(buffer.device)


def _is_plain(buffer: torch.Tensor) -> bool:
    """Return whether a buffer can be broadcast as it is."""
    return buffer.dtype in _SENT and buffer.is_contiguous()


def _form(buffer: torch.Tensor | None) -> tuple[tuple[int, ...], str, bool] | None:
    """Return what must be the same on all ranks for a broadcast."""
    if buffer is None:
        return None
    shape = tuple(buffer.shape)
    return shape, str(buffer.dtype), buffer.is_contiguous()
