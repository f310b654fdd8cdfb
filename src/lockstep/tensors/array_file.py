"""Arrays on disk whose rows several processes write at once: .npy, .npz, .safetensors.

All three are a header that says names, formats and shapes, then the numbers row by row. How many
rows there will be is known before the first is computed, so where each lies is too, and every rank
writes its own::

    0.npy   | header | row 0 | row 1 | row 2 | row 3 | row 4 |
                     | rank 0 ...... | rank 1 ...... | rank 0 ...

An .npz is a zip archive of .npy files, put together at the end. NumPy's memory-mapped files would
end the process by a signal where the disk is full; here that is an error, mostly before anything is
computed.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html,
    https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        file, start: where its first row begins; see ``layout``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0

    @property
    def row(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after its last row."""
        return self.start + self.shape[0] * self.row


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in files.

    Attributes:
        headers: what each file begins with, by the file's name.
        arrays: by their names.
    """

    headers: dict[str, bytes]
    arrays: dict[str, Array]

    def size(self, file: str) -> int:
        """Return the bytes of a file."""
        ends = [array.end for array in self.arrays.values() if array.file == file]
        return max(len(self.headers[file]), *ends)


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
}


def layout(ending: str, arrays: list[Array]) -> Layout:
    """Return where the rows of these arrays go.

    Args:
        ending: ``".npy"``, ``".npz"`` or ``".safetensors"``; ``""`` is for memory, without a
            header.
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

    arrays = [replace(array, dtype=_kept(ending, array)) for array in arrays]
    if ending == ".safetensors":
        return _safetensors(arrays)
    found = Layout({}, {})
    for i, array in enumerate(arrays):
        file = f"{i}.npy"
        header = _numpy_header(array) if ending else b""
        found.headers[file] = header
        found.arrays[array.name] = replace(array, file=file, start=len(header))

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


def _safetensors(arrays: list[Array]) -> Layout:
    """Return the layout of one file for all arrays.

    Large numbers come first, so that each array begins at a multiple of its own number's size.
    """
    placed: list[Array] = []
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for array in sorted(arrays, key=lambda array: -array.dtype.itemsize):
        array = replace(array, file="arrays", start=end)
        end = array.end
        placed.append(array)
        fields[array.name] = {
            "dtype": SAFETENSORS_TYPES[array.dtype],
            "shape": array.shape,
            "data_offsets": [array.start, end],
        }

    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    moved = {array.name: replace(array, start=len(header) + array.start) for array in placed}
    return Layout({"arrays": header}, moved)


def create(folder: Path, layout: Layout) -> None:
    """Make the files, with their headers, and take the room that they need."""
    for name, header in layout.headers.items():
        size = layout.size(name)
        with writing(folder / name, size), (folder / name).open("xb") as file:
            file.write(header)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except (AttributeError, OSError) as error:  # not on this system, or not on this disk
                if getattr(error, "errno", errno.EINVAL) not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.truncate(file.fileno(), size)


def write_rows(folder: Path, layout: Layout, name: str, first: int, rows: Tensor) -> None:
    """Write rows of an array in the files that ``create`` has made.

    Args:
        folder: of the files.
        layout: of the files.
        name: the array's.
        first: the number of the first row.
        rows: some rows, on any device.

    Raises:
        InputError: they are of another shape than those before.
        SaveError: they can't be written.
    """
    array = layout.arrays[name]
    if tuple(rows.shape[1:]) != array.shape[1:]:
        raise InputError(
            f'outputs: rows of "{name}" have shape {array.shape[1:]} in the first batch and '
            f"{tuple(rows.shape[1:])} in another, which no array can hold: take .jsonl"
        )

    rows = rows.detach().to("cpu", array.dtype).resolve_conj().resolve_neg()
    path = folder / array.file
    if not path.is_file():
        raise SaveError(
            f"{path}: can't be opened on every rank: on several machines, name a file in a folder "
            "that all of them share"
        )

    with writing(path, layout.size(array.file)), path.open("rb+") as file:
        file.seek(array.start + first * array.row)
        file.write(bits_of(rows).numpy().data)


def archive(target: Path, folder: Path, layout: Layout) -> None:
    """Put the files of a layout together as an .npz; each is removed when it is in."""
    size = sum(map(layout.size, layout.headers))
    with writing(target, size), zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as whole:
        for name, array in layout.arrays.items():
            whole.write(folder / array.file, f"{name}.npy")
            (folder / array.file).unlink()


def mapped(folder: Path, layout: Layout) -> dict[str, Tensor]:
    """Return the arrays of a layout without headers as memory, by name.

    The files may be removed afterwards.
    """
    found = {}
    for name, array in layout.arrays.items():
        flat = torch.empty(0, dtype=array.dtype)
        if count := math.prod(array.shape):
            path = str(folder / array.file)
            flat = torch.from_file(path, shared=False, size=count, dtype=array.dtype)
        found[name] = flat.view(array.shape)

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
