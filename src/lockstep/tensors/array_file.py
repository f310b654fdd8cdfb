"""Arrays on disk whose rows several processes write at once, as bare numbers.

An array is a file of its own. How many rows there will be is known before the first is computed, so
where each lies is too, and every rank writes its own::

    0   | row 0 | row 1 | row 2 | row 3 | row 4 |
        | rank 0 ...... | rank 1 ...... | rank 0 ...

Memory-mapped files would end the process by a signal where the disk is full; here that is an error,
mostly before anything is computed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from lockstep.errors import InputError, SaveError
from lockstep.tensors.digest import bits_of


@dataclass(frozen=True)
class Array:
    """An array to be written.

    Attributes:
        name, dtype, shape: as it is kept, rows first.
        file: the name of its file; see ``arrays_in_files``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self.shape[0] * self.row


SAFETENSORS_TYPES = {
    dtype: name
    for name, dtype in safetensors.torch._TYPES.items()
    if dtype and not dtype.is_complex
}
"""The names of formats in safetensors files; older readers lack complex ones."""


def arrays_in_files(ending: str, arrays: Sequence[Array]) -> list[Array]:
    """Give arrays a file each, in a format that the file that is made of them in the end has.

    Args:
        ending: of that file: ``".npy"``, ``".npz"`` or ``".safetensors"``; ``""`` for memory.
        arrays: formats that the file lacks (bfloat16 in NumPy's) become float32.

    Raises:
        InputError: the file can't hold them.
    """
    if ending == ".npy" and len(arrays) > 1:
        names = ", ".join(array.name for array in arrays)
        raise InputError(
            f"out: a .npy file holds one array, and the outputs have {len(arrays)} ({names}): "
            "take .npz"
        )

    found = []
    for i, array in enumerate(arrays):
        found.append(replace(array, dtype=_kept(ending, array), file=str(i)))

    return found


def _kept(ending: str, array: Array) -> torch.dtype:
    """Return the format in which a file keeps an array."""
    is_known = array.dtype in SAFETENSORS_TYPES
    if ending != ".safetensors":
        is_known = not ending or _is_numpys(array.dtype)
    if is_known:
        return array.dtype
    if array.dtype.is_floating_point:
        return torch.float32
    raise InputError(
        f'out: a {ending} file has no format for "{array.name}", which is {array.dtype}: take '
        ".jsonl"
    )


def _is_numpys(dtype: torch.dtype) -> bool:
    """Return whether NumPy has a format."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def create(folder: Path, arrays: Sequence[Array]) -> None:
    """Make the files of arrays, and take the room that they need."""
    for array in arrays:
        path = folder / array.file
        with writing(path, array.size), path.open("xb") as file:
            file.truncate(array.size)
            take_room(file.fileno(), array.size)


def take_room(file: int, size: int) -> None:
    """Have the disk reserve the bytes of a file, where system and disk can."""
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def write_rows(folder: Path, array: Array, first: int, rows: Tensor) -> None:
    """Write rows of an array in the file that ``create`` has made.

    Args:
        folder: of the file.
        array: which one.
        first: the number of the first row.
        rows: some rows, on any device.

    Raises:
        InputError: they are of another shape than those before.
        SaveError: they can't be written.
    """
    if tuple(rows.shape[1:]) != array.shape[1:]:
        raise InputError(
            f'outputs: rows of "{array.name}" have shape {array.shape[1:]} in the first batch and '
            f"{tuple(rows.shape[1:])} in another, which no array can hold: take .jsonl"
        )

    rows = rows.detach().to("cpu", array.dtype).resolve_conj().resolve_neg()
    path = folder / array.file
    if not path.is_file():
        raise SaveError(
            f"{path}: can't be opened on every rank: on several machines, name a file in a folder "
            "that all of them share"
        )

    with writing(path, array.size), path.open("rb+") as file:
        file.seek(first * array.row)
        file.write(bits_of(rows).numpy().data)


def mapped(folder: Path, arrays: Sequence[Array]) -> dict[str, Tensor]:
    """Return arrays as memory, by name.

    The files may be removed afterwards.
    """
    found = {}
    for array in arrays:
        flat = torch.empty(0, dtype=array.dtype)
        if array.size:
            path = str(folder / array.file)
            count = math.prod(array.shape)
            flat = torch.from_file(path, shared=False, size=count, dtype=array.dtype)
        found[array.name] = flat.view(array.shape)

    return found


@contextlib.contextmanager
def writing(path: Path, size: int | None = None) -> Iterator[None]:
    """Raise a ``SaveError`` of one line where a file can't be written.

    Args:
        path: the file, in a folder beside the person's.
        size: its bytes, where they are known.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = "" if size is None else f", {size / 1e6:,.1f} MB are needed"
            why = f"the disk is full{needed}"
        raise SaveError(f"{path.parent.parent}: the outputs can't be written: {why}") from error
