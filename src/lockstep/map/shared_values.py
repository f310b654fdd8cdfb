"""Values on their way to another process: tensors and arrays go as they lie in memory, the rest is
pickled.

::

    {"loss": 0.1, "logits": tensor}, ...  ──>  a block:
    | where the pickles begin | bytes of the tensor | ... | sizes | the pickles |

They are found in any nesting, also inside of a person's own objects, since it is the pickler that
meets them. A block is a file in memory without a name that both processes have open: nothing can be
left behind, and it is written over by the next values. What is read out of it is a copy of the
reader's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
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

_LARGE = 1 << 11
"""Bytes from which a tensor or an array isn't copied into the pickle."""

_HEAD = 8
"""Bytes of the number that gives the place where the pickles begin."""

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
    body = io.BytesIO()
    pickler = _Pickler(body)
    sizes: list[int] = []

    with open(block, "r+b", closefd=False) as target:
        target.seek(_HEAD)
        for together in _grouped(values):
            try:
                pickler.dump(together)
            except Exception as problem:
                error = problem
                kind = type(together[0]).__qualname__
                break
            sizes += [piece.nbytes for piece in pickler.pieces]
            target.writelines(pickler.pieces)
            pickler.forget()
            count += len(together)

        begin = target.tell()
        pickle.dump([*sizes, body.tell()], target)
        target.write(body.getbuffer())
        size = target.tell()
        target.seek(0)
        target.write(begin.to_bytes(_HEAD))

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
    with open(block, "rb", closefd=False) as file:
        file.seek(0)
        begin = int.from_bytes(file.read(_HEAD))
        file.seek(begin)
        *sizes, length = pickle.load(file)
        body = io.BytesIO(file.read(length))
        file.seek(_HEAD)
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            if file.readinto(buffer) < len(buffer):
                raise EOFError("a value is shorter than its head says")
    rest = iter(buffers)
    values: list[Any] = []
    while len(values) < count:
        values += pickle.load(body, buffers=rest)
    return values


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Keeps large buffers apart, and tells the pickler that a tensor is one.

    Attributes:
        pieces: the buffers of the last value, in order.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take)
        self.pieces: list[memoryview] = []
        self._held: list[Any] = []

    def forget(self) -> None:
        """Begin another value, which shares nothing with the one before."""
        self.pieces.clear()
        self._held.clear()
        self.clear_memo()

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a buffer apart; a small one is left to the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        self.pieces.append(raw)
        return False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _is_plain(obj):
            return self._reduced(obj)
        return super().reducer_override(obj)

    def _reduced(self, tensor: torch.Tensor) -> Any:
        learns = tensor.requires_grad and tensor.is_leaf
        flat = tensor.detach().cpu().resolve_conj().resolve_neg()
        if torch.empty_like(flat).stride() != flat.stride():  # it has gaps, or overlaps
            flat = flat.contiguous()
        self._held.append(flat)
        size = flat.numel() * flat.element_size()
        data: Any = bytearray()
        if size:
            data = (ctypes.c_ubyte * size).from_address(flat.data_ptr())
        shape = tuple(flat.shape)
        buffer = pickle.PickleBuffer(data)
        return _rebuilt, (buffer, flat.dtype, shape, flat.stride(), type(tensor), learns)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its numbers in memory alone; any other goes as PyTorch pickles it."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    has_more = tensor.is_quantized or tensor.is_meta or nn.parameter.is_lazy(tensor)
    return not has_more and not getattr(tensor, "__dict__", None)


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
        numbers = torch.frombuffer(data, dtype=torch.uint8)
        made = numbers.view(dtype).as_strided(shape, stride)

    if kind is nn.Parameter:
        return nn.Parameter(made, learns)
    return made.requires_grad_(learns)
