"""Values on their way to another process, through a file in memory that both have open.

The values are pickled into it one after the other. Tensors, in any nesting, go as their numbers lie
in memory (PyTorch would open a file for each). A block is a file without a name: nothing can be
left behind, and it is written over by the next values. What is read out of it is a copy of the
reader's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import cloudpickle
import torch

_KEPT = 16 << 20
"""Bytes of a block that are kept for the next values, however small these are."""


def new_block(stack: contextlib.ExitStack) -> int:
    """Open a file without a name, in memory where the system can do that; it is closed when the
    stack ends.
    """
    # Not bound by the size of /dev/shm, which is small in containers.
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("lockstep")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    stack.callback(os.close, number)
    return number


class Packed(NamedTuple):
    """What was written to a block.

    Attributes:
        length: how many values.
        bytes: their size.
        error: what pickling the next value raised; None where all of them are there.
        kind: the type of that value.
    """

    length: int
    bytes: int
    error: Exception | None
    kind: str


def pack(values: Iterable[Any], block: int) -> Packed:
    """Write values for another process, up to the first that can't be pickled.

    What can change is written before the next value is drawn. A tensor goes without its graph.

    Args:
        values: anything that cloudpickle can send.
        block: the open file that both have; its earlier contents aren't needed any more.
    """
    count = 0
    error = None
    kind = ""
    with open(block, "wb", closefd=False) as target:
        target.seek(0)
        pickler = _Pickler(target, protocol=5)
        for value in values:
            try:
                pickler.dump(value)
            except Exception as problem:
                error = problem
                kind = type(value).__qualname__
                break
            pickler.clear_memo()
            count += 1
        size = target.tell()

    if os.fstat(block).st_size > max(_KEPT, 4 * size):
        os.ftruncate(block, size)
    return Packed(count, size, error, kind)


def unpack(block: int, count: int) -> list[Any]:
    """Read the first values that ``pack`` wrote; the block is free again afterwards."""
    with open(block, "rb", closefd=False) as file:
        file.seek(0)
        return [pickle.load(file) for _ in range(count)]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor to its numbers; one that has more than these goes as PyTorch pickles it."""
        if type(obj) is not torch.Tensor or obj.layout != torch.strided:
            return super().reducer_override(obj)
        if obj.is_quantized or obj.is_meta or obj.__dict__:
            return super().reducer_override(obj)
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        buffer = pickle.PickleBuffer(plain.view(-1).view(torch.uint8).numpy().data)
        learns = obj.requires_grad and obj.is_leaf
        return _rebuilt, (buffer, plain.dtype, plain.shape, learns)


def _rebuilt(data: Any, dtype: torch.dtype, shape: torch.Size, learns: bool) -> torch.Tensor:
    # Nothing can be made from a buffer of no bytes.
    made = torch.frombuffer(data, dtype=dtype) if shape.numel() else torch.empty(0, dtype=dtype)
    return made.view(shape).requires_grad_(learns)
