"""Parameters that are built in files, for a model that is larger than the memory of a process.

While the job builds its model, each parameter that a module is given is moved to a file that is mapped into memory, so
that the system may write it out. ``fully_shard`` then copies this rank's part of each.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_SMALL = 1 << 16
"""Bytes that are not worth a file."""


@contextlib.contextmanager
def parameters_on_disk(folder: str | None) -> Iterator[None]:
    """Put the parameters of modules that are built meanwhile in files, which no name leads to.

    Args:
        folder: where there is room for the whole model; None is the system's folder for temporary files.
    """

    def hook(module: nn.Module, name: str, p: torch.Tensor | None) -> nn.Parameter | None:
        del module, name
        if type(p) is not nn.Parameter or not p.is_cpu or p.nbytes < _SMALL or p.untyped_storage().filename is not None:
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".parameter-") as file:
            mapped = torch.from_file(file.name, shared=True, size=p.numel(), dtype=p.dtype).view(p.shape)
        mapped.copy_(p.detach())
        return nn.Parameter(mapped, requires_grad=p.requires_grad)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
