"""Weights in memory that all ranks of one machine share.

The memory is a file without a name: nothing can be left behind, however a rank ends, and
`/dev/shm`, which is small in containers, doesn't bound it.
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch import nn

from lockstep.errors import RunError
from lockstep.launch.world import World
from lockstep.tensors.array_file import take_room

_LINE = 64
"""Bytes of a cache line: where a tensor begins."""


class SharedWeights:
    """The parameters of a model, moved to memory that every rank sees.

    Args:
        model: with the same values on all ranks.
        world: the ranks, all on one machine.

    Raises:
        RunError: there isn't enough memory.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._parameters = dict(model.named_parameters())
        places = {}
        size = 0
        for name, p in self._parameters.items():
            places[name] = size
            lines = -(-p.nbytes // _LINE)
            size += lines * _LINE

        memory = _mapped(world, max(size, 1))
        with torch.no_grad():
            for name, p in self._parameters.items():
                flat = memory[places[name] :][: p.nbytes].view(p.dtype)
                view = flat.as_strided(p.shape, torch.empty_like(p).stride())
                if world.is_first:
                    view.copy_(p)
                p.data = view

        world.barrier()
        self._addresses = {name: p.data_ptr() for name, p in self._parameters.items()}

    def check(self) -> None:
        """Make sure that the parameters still lie in the shared memory.

        Raises:
            RunError: something has given one other memory, which the other ranks don't see.
        """
        for name, p in self._parameters.items():
            if p.data_ptr() != self._addresses[name]:
                raise RunError(
                    f'parameter "{name}" no longer lies in the memory that the ranks share: its '
                    ".data was set; write into it, with copy_, or take ddp"
                )


def _mapped(world: World, size: int) -> torch.Tensor:
    """Map the bytes of one file into the memory of every rank."""
    file = -1
    path = ""
    if world.is_first:
        file, path = _made()
        try:
            os.truncate(file, size)
            # A lack of memory would show as a crash, when it is written.
            take_room(file, size)
        except OSError as error:
            raise RunError(
                f"hogwild: there is no room for {size >> 20:,} MiB of shared weights: {error}"
            ) from error
    path = world.broadcast_object(path)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    world.barrier()
    if world.is_first:
        os.close(file)
        if not path.startswith("/proc/"):
            os.unlink(path)
    return memory


def _made() -> tuple[int, str]:
    """Make a file, without a name where the system can; give the path that it is opened by."""
    if not hasattr(os, "memfd_create"):
        return tempfile.mkstemp(prefix="lockstep-")
    file = os.memfd_create("lockstep")
    return file, f"/proc/{os.getpid()}/fd/{file}"
