"""Parameters that are built in files, for a model that is larger than the memory of a process.

While the job builds its model, each parameter that a module is given is moved to a file that is
mapped into memory, so that the system may write it out. ``fully_shard`` then copies this rank's
part of each.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lockstep.errors import FolderError
from lockstep.tensors.array_file import take_room

_SMALL = 1 << 16
"""Bytes that are not worth a file."""


@contextlib.contextmanager
def parameters_on_disk(folder: str | None) -> Iterator[None]:
    """Put the parameters of modules that are built in this context in files without a name.

    Args:
        folder: where there is room for the whole model; None is the system's folder for temporary
            files.

    Raises:
        FolderError: there is no room for a parameter.
    """

    def hook(module: nn.Module, name: str, p: torch.Tensor | None) -> nn.Parameter | None:
        if type(p) is not nn.Parameter or not p.is_cpu or p.nbytes < _SMALL:
            return None
        if p.untyped_storage().filename is not None:
            return None
        return _mapped(p, folder)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _mapped(p: nn.Parameter, folder: str | None) -> nn.Parameter:
    """Return the parameter in the memory of a file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".parameter-") as file:
        try:
            # Writing to memory for which the disk has no room would kill the process.
            take_room(file.fileno(), p.nbytes)
        except OSError as error:
            raise FolderError(
                f"{Path(file.name).parent}: no room for a parameter of {p.nbytes / 1e6:,.1f} MB "
                f"({error.strerror}), which build_on_disk needs for each rank's whole model: free "
                "some space, or give another --folder"
            ) from error
        flat = torch.from_file(file.name, shared=True, size=p.numel(), dtype=p.dtype)
    mapped = flat.view(p.shape)
    mapped.copy_(p.detach())
    return nn.Parameter(mapped, requires_grad=p.requires_grad)
