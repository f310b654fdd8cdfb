"""Arrays on disk whose rows several processes write at once: .npy, or bare numbers.

An array is a file of its own: a header that says format and shape, then the numbers row by row. How
many rows there will be is known before the first is computed, so where each lies is too, and every
rank writes its own::

    0.npy   | header | row 0 | row 1 | row 2 | row 3 | row 4 |
                     | rank 0 ...... | rank 1 ...... | rank 0 ...

An .npz is a zip archive of such files. NumPy's memory-mapped files would end the process by a
signal where the disk is full; here that is an error, mostly before anything is computed.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
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
        header: what the file begins with.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""
    header: bytes = b""

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + self.shape[0] * self.row


SAFETENSORS_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def arrays_in_files(ending: str, arrays: Sequence[Array]) -> list[Array]:
    """Give arrays a file each, as the file that is made of them in the end needs it.

    Args:
        ending: of that file: ``".npy"``, ``".npz"`` or ``".safetensors"``; ``""`` for memory. Only
            NumPy's have headers.
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
        kept = replace(array, dtype=_kept(ending, array), file=f"{i}.npy")
        if ending in (".npy", ".npz"):
            kept = replace(kept, header=_numpy_header(kept))
        found.append(kept)

    return found


def _kept(ending: str, array: Array) -> torch.dtype:
    """Return the format in which a file keeps an array."""
    if ending == ".safetensors":
        is_known = array.dtype in SAFETENSORS_TYPES
    else:
        is_known = not ending or _numpy_format(array.dtype) is not None

    if is_known:
        return array.dtype
    if array.dtype.is_floating_point:
        return torch.float32
    raise InputError(
        f'out: a {ending} file has no format for "{array.name}", which is {array.dtype}: take '
        ".jsonl"
    )


def _numpy_format(dtype: torch.dtype) -> str | None:
    """Return NumPy's name of a format; None where NumPy lacks it."""
    try:
        return str(torch.empty(0, dtype=dtype).numpy().dtype.str)
    except TypeError:
        return None


def _numpy_header(array: Array) -> bytes:
    """Return what an .npy file begins with."""
    file = io.BytesIO()
    header = {"descr": _numpy_format(array.dtype), "fortran_order": False, "shape": array.shape}
    numpy.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def create(folder: Path, arrays: Sequence[Array]) -> None:
    """Make the files of arrays, with their headers, and take the room that they need."""
    for array in arrays:
        path = folder / array.file
        with writing(path, array.size), path.open("xb") as file:
            file.write(array.header)
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
        file.seek(len(array.header) + first * array.row)
        file.write(bits_of(rows).numpy().data)


def archive(target: Path, folder: Path, arrays: Sequence[Array]) -> None:
    """Put the files of arrays together as an .npz; each is removed when it is in."""
    size = sum(array.size for array in arrays)
    with writing(target, size), zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as whole:
        for array in arrays:
            whole.write(folder / array.file, f"{array.name}.npy")
            (folder / array.file).unlink()


def mapped(folder: Path, arrays: Sequence[Array]) -> dict[str, Tensor]:
    """Return arrays without headers as memory, by name.

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
