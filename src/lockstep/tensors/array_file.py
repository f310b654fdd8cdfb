"""Arrays on disk whose rows several processes write at once: .npy, .npz, .safetensors.

All three are a header that says names, formats and shapes, then the numbers row by row. How many rows there will be is
known before the first is computed, so where each lies is too, and every rank writes its own::

    arrays.npy   | header | row 0 | row 1 | row 2 | row 3 | row 4 |
                          | rank 0 ...... | rank 1 ...... | rank 0 ...

An .npz is a zip archive of .npy files, put together at the end. NumPy itself isn't needed. Its memory-mapped files
would end the process by a signal where the disk is full; here that is an error, mostly before anything is computed.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.errors import InputError, SaveError


@dataclass(frozen=True)
class Array:
    """An array to be written: its name, the format that it is kept in, and its shape, rows first."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.row


@dataclass(frozen=True)
class Layout:
    """Files, and where in them the rows of each array begin.

    Attributes:
        headers: by file name, what it begins with.
        sizes: by file name, its size in bytes.
        places: by name of the array: the array, its file, and the byte where its first row begins.
    """

    headers: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, tuple[Array, str, int]]


_NUMPY = {
    torch.bool: "|b1", torch.uint8: "|u1", torch.int8: "|i1", torch.int16: "<i2", torch.int32: "<i4",
    torch.int64: "<i8", torch.uint16: "<u2", torch.uint32: "<u4", torch.uint64: "<u8", torch.float16: "<f2",
    torch.float32: "<f4", torch.float64: "<f8", torch.complex64: "<c8", torch.complex128: "<c16",
}  # fmt: skip
_SAFE = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
_ALIGNED = 64


def layout(ending: str, arrays: list[Array]) -> Layout:
    """Where the rows of these arrays go.

    Args:
        ending: ``".npy"``, ``".npz"`` or ``".safetensors"``; ``""`` is for memory, without a header.
        arrays: formats that the file lacks (bfloat16 in NumPy's) become float32.

    Raises:
        InputError: the file can't hold them.
    """
    if ending == ".npy" and len(arrays) > 1:
        names = ", ".join(array.name for array in arrays)
        raise InputError(f"out: a .npy file holds one array, and the outputs have {len(arrays)} ({names}): take .npz")
    arrays = [Array(array.name, _kept(ending, array), array.shape) for array in arrays]
    if ending in (".npy", ".npz"):
        files = {f"{i}.npy": array for i, array in enumerate(arrays)}
        headers = {file: _numpy_header(array) for file, array in files.items()}
        sizes = {file: len(headers[file]) + array.bytes for file, array in files.items()}
        return Layout(headers, sizes, {array.name: (array, file, len(headers[file])) for file, array in files.items()})
    # Large numbers first, so that each array begins at a multiple of its own.
    arrays = sorted(arrays, key=lambda array: -array.dtype.itemsize)
    starts: dict[str, int] = {}
    end = 0
    for array in arrays:
        if ending == "":
            end += -end % _ALIGNED
        starts[array.name] = end
        end += array.bytes
    header = b"" if ending == "" else _safe_header(arrays, starts)
    places = {array.name: (array, "arrays", len(header) + starts[array.name]) for array in arrays}
    return Layout({"arrays": header}, {"arrays": len(header) + end}, places)


def _kept(ending: str, array: Array) -> torch.dtype:
    known = {".npy": _NUMPY, ".npz": _NUMPY, ".safetensors": _SAFE}.get(ending)
    if known is None or array.dtype in known:
        return array.dtype
    if array.dtype.is_floating_point:
        return torch.float32
    raise InputError(f'out: a {ending} file has no format for "{array.name}", which is {array.dtype}: take .jsonl')


def _numpy_header(array: Array) -> bytes:
    fields = {"descr": _NUMPY[array.dtype], "fortran_order": False, "shape": array.shape}
    text = repr(fields).encode("latin1")
    fill = -(10 + len(text) + 1) % _ALIGNED
    return b"\x93NUMPY\x01\x00" + (len(text) + fill + 1).to_bytes(2, "little") + text + b" " * fill + b"\n"


def _safe_header(arrays: list[Array], starts: Mapping[str, int]) -> bytes:
    fields = {
        array.name: {
            "dtype": _SAFE[array.dtype],
            "shape": array.shape,
            "data_offsets": [starts[array.name], starts[array.name] + array.bytes],
        }
        for array in arrays
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **fields}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def create(folder: Path, layout: Layout) -> None:
    """Make the files, with their headers, and take the room that they need.

    Raises:
        SaveError: there isn't as much.
    """
    for name, header in layout.headers.items():
        path = folder / name
        try:
            with path.open("xb") as file:
                file.write(header)
                file.flush()
                _take_room(file.fileno(), layout.sizes[name])
        except OSError as error:
            raise not_written(path, error, layout.sizes[name]) from error


def _take_room(file: int, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.truncate(file, size)


class RowWriter:
    """Writes rows of the arrays of a layout, in files that ``create`` has made.

    Raises:
        SaveError: the files can't be opened (ranks on other machines see another folder).
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._files: dict[str, int] = {}
        for name in layout.headers:
            try:
                self._files[name] = os.open(folder / name, os.O_WRONLY)
            except OSError as error:
                self.close()
                raise SaveError(
                    f"{folder / name}: can't be opened on every rank ({error.strerror}): on several machines, name a "
                    "file in a folder that all of them share"
                ) from error

    def write(self, name: str, first: int, rows: torch.Tensor) -> None:
        """Write ``rows`` of the array of that name, from row ``first`` on.

        Raises:
            InputError: they are of another shape than those before.
            SaveError: they can't be written.
        """
        array, file, start = self._layout.places[name]
        if tuple(rows.shape[1:]) != array.shape[1:]:
            raise InputError(
                f'outputs: rows of "{name}" have shape {array.shape[1:]} in the first batch and '
                f"{tuple(rows.shape[1:])} in another, which no array can hold: take .jsonl"
            )
        rows = rows.detach().to("cpu", array.dtype).resolve_conj().resolve_neg().contiguous()
        size = rows.numel() * rows.element_size()
        if not size:
            return
        view = memoryview((ctypes.c_char * size).from_address(rows.data_ptr()))
        offset = start + first * array.row
        try:
            while view:
                done = os.pwrite(self._files[file], view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise not_written(self._folder / file, error, self._layout.sizes[file]) from error

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def archive(target: Path, folder: Path, layout: Layout) -> None:
    """Put the files of a layout together as an .npz, each taken away when it is in.

    Raises:
        SaveError: it can't be written.
    """
    try:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as whole:
            for name, (_, file, _) in layout.places.items():
                whole.write(folder / file, f"{name}.npy")
                (folder / file).unlink()
    except OSError as error:
        raise not_written(target, error, sum(layout.sizes.values())) from error


def mapped(folder: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """The arrays of a layout without headers, by name, as memory; the file may be taken away afterwards."""
    size = layout.sizes["arrays"]
    path = str(folder / "arrays")
    held = torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0).byte()
    found = {}
    for name, (array, _, start) in layout.places.items():
        found[name] = held[start : start + array.bytes].view(array.dtype).view(array.shape)
    return found


def not_written(path: Path, error: OSError, size: int | None = None) -> SaveError:
    """What to raise where a file can't be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f", {size / 1e6:,.1f} MB are needed" if size is not None else ""
        return SaveError(f"{path.parent.parent}: the outputs can't be written: the disk is full{needed}")
    return SaveError(f"{path.parent.parent}: the outputs can't be written: {error.strerror or error}")
