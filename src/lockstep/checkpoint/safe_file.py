"""A file of tensors (.safetensors) that is written once, with its SHA-256, and never through a link.

Source: https://github.com/huggingface/safetensors (a header of 8 bytes and JSON, then the numbers).
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from lockstep.errors import SaveError, first_line
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.new_file import opened_new

_SPAN = 1 << 22
"""Bytes that are hashed and written at once: they stay in a core's cache."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write contiguous CPU tensors; gives the file's size and its SHA-256.

    Raises:
        OSError: it can't be written.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that each is aligned
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        kind = SAFETENSORS_TYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    summed = hashlib.sha256()
    with opened_new(path) as file:
        head = len(text).to_bytes(8, "little") + text
        for piece in itertools.chain([memoryview(head)], *(bytes_of(tensor) for _, tensor in ordered)):
            summed.update(piece)
            file.write(piece)
    return 8 + len(text) + end, summed.hexdigest()


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous CPU tensor, some at a time."""
    if tensor.numel():
        flat = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(flat), _SPAN):
            yield flat[start : start + _SPAN]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def could_not_write(path: Path, error: Exception, kept: str, *, resumable: bool) -> SaveError:
    """The error of one line for a file that could not be written.

    Args:
        path: of the file or folder.
        error: what was raised.
        kept: which one of before is still there, or "".
        resumable: whether there is something to resume from.
    """
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    what = "the disk is full" if full else f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, OSError) and not full:
        what = error.strerror or what
    kept = f"; {kept} is kept" if kept else ""
    advice = f"; free some space, then {'--resume the run' if resumable else 'begin anew'}" if full else ""
    return SaveError(f"{path}: could not be written: {what}{kept}{advice}")
