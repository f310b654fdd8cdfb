"""Values on their way to another process, through a file in memory that both have open.

The values are pickled into it one after the other. Tensors, in any nesting, go as their numbers lie
in memory (PyTorch would open a file for each). A block is a file without a name: nothing can be
left behind, and it is written over by the next values. What is read out of it is a copy of the
reader's own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from lockstep.tensors.pytree import CONSTANTS

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
        for together in _grouped(values):
            try:
                pickler.dump(together)
            except Exception as problem:
                error = problem
                kind = type(together[0]).__qualname__
                break
            pickler.clear_memo()
            count += len(together)
        size = target.tell()

    if os.fstat(block).st_size > max(_KEPT, 4 * size):
        os.ftruncate(block, size)
    return Packed(count, size, error, kind)


def _grouped(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the values in lists; each list is one pickle.

    Numbers and strings that follow one another are in one list, since a pickle for each would take
    most of the time of a quick map. Any other value has its own: a generator may write its next
    item into the same memory.
    """
    for is_constant, run in itertools.groupby(values, _is_constant):
        if is_constant:
            yield list(run)
        else:
            for value in run:
                yield [value]


def _is_constant(value: object) -> bool:
    return type(value) in CONSTANTS


def unpack(block: int, count: int) -> list[Any]:
    """Read the first values that ``pack`` wrote; the block is free again afterwards."""
    values: list[Any] = []
    with open(block, "rb", closefd=False) as file:
        file.seek(0)
        while len(values) < count:
            values += pickle.load(file)
    return values


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor to its numbers; one that has more than these goes as PyTorch pickles it."""
        if type(obj) not in (torch.Tensor, nn.Parameter) or obj.layout != torch.strided:
            return super().reducer_override(obj)
        if obj.is_quantized or obj.is_meta or nn.parameter.is_lazy(obj) or obj.__dict__:
            return super().reducer_override(obj)
        flat = obj.detach().cpu().resolve_conj().resolve_neg()
        if torch.empty_like(flat).stride() != flat.stride():  # it has gaps, or overlaps
            flat = flat.contiguous()
        numbers = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
        learns = obj.requires_grad and obj.is_leaf
        shape = tuple(flat.shape)
        buffer = pickle.PickleBuffer(numbers)
        return _rebuilt, (buffer, flat.dtype, shape, flat.stride(), type(obj), learns)


def _rebuilt(
    data: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    kind: type,
    learns: bool,
) -> torch.Tensor:
    if 0 in shape:
        made = torch.empty_strided(shape, stride, dtype=dtype)
    else:
        made = torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)
    return nn.Parameter(made, learns) if kind is nn.Parameter else made.requires_grad_(learns)
