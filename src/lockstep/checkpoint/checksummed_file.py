"""A file of tensors (.safetensors) that is written once, with its SHA-256, and never through a
link.

Source: https://github.com/huggingface/safetensors (a header of 8 bytes and JSON, then the numbers).
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import SaveError, first_line
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.digest import bits_of
from lockstep.tensors.new_file import opened_new

_SPAN = 1 << 22
"""Bytes that are hashed and written at once: they stay in a core's cache."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> tuple[int, str]:
    """Write contiguous CPU tensors; gives the file's size and its SHA-256.

    Args:
        path: the file.
        tensors: by name.
        metadata: of the file.

    Raises:
        OSError: it can't be written.
    """
    # So each tensor is aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start = end
        end += tensor.shape.numel() * tensor.dtype.itemsize
        kind = SAFETENSORS_TYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    summed = hashlib.sha256()
    with opened_new(path) as file:

        def write(piece: bytes | memoryview) -> None:
            summed.update(piece)
            file.write(piece)

        write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for piece in bytes_of(tensors[name]):
                write(piece)
    return 8 + len(text) + end, summed.hexdigest()


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous CPU tensor, some at a time."""
    if tensor.numel():
        flat = memoryview(bits_of(tensor).numpy().data)
        for start in range(0, len(flat), _SPAN):
            yield flat[start : start + _SPAN]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def could_not_write(path: Path, error: Exception, kept: str, *, resumable: bool) -> SaveError:
    """Return the error of one line for a file that could not be written.

    Args:
        path: of the file or folder.
        error: what was raised.
        kept: the earlier file that is still there, or "".
        resumable: whether there is something to resume from.
    """
    number = getattr(error, "errno", None)
    advice = ""
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        what = "the disk is full"
        then = "--resume the run" if resumable else "begin anew"
        advice = f"; free some space, then {then}"
    elif isinstance(error, OSError) and error.strerror:
        what = error.strerror
    else:
        what = f"{type(error).__name__}: {first_line(error)}"
    if kept:
        what += f"; {kept} is kept"
    return SaveError(f"{path}: could not be written: {what}{advice}")
