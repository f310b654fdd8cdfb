"""Values on their way to another process: tensors and arrays go as they lie in memory, the rest is
pickled.

::

    {"loss": 0.1, "logits": tensor}  ──>  a block:  | sizes | the pickle | bytes of the tensor | ...

They are found in any nesting, also inside of a person's own objects, since it is the pickler that
meets them. A block is a file in memory without a name that both processes have open: nothing can be
left behind, and it is written over by the next value, so that its size is that of the largest. What
is read out of it is a copy of the reader's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import tempfile
from typing import Any

import cloudpickle
import torch
from torch import nn

from lockstep.errors import RunError

_LARGE = 1 << 11
"""Bytes from which a tensor or an array isn't copied into the pickle."""

_KEPT = 16 << 20
"""Bytes of a block that are kept for the next value, however small that is."""


def new_block(stack: contextlib.ExitStack) -> int:
    """A file without a name, in memory where the system can do that, of no size yet; open until
    the stack ends.
    """
    # Not bound by the size of /dev/shm, which is small in containers.
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("lockstep")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    stack.callback(os.close, number)
    return number


def pack(value: Any, block: int) -> int:
    """Write a value for another process, which ``unpack``s it; gives its bytes. A tensor goes
    without its graph.

    Args:
        value: anything that cloudpickle can send.
        block: the open file that both have, of which nothing is needed any more.

    Raises:
        Exception: whatever pickling it raises; OSError where memory is short.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    pieces = [file.getbuffer(), *pickler.pieces]
    sizes = [piece.nbytes for piece in pieces]
    total = sum(sizes)
    if os.fstat(block).st_size > max(_KEPT, 4 * total):
        os.ftruncate(block, 0)
    with open(block, "wb", closefd=False) as target:
        target.seek(0)
        pickle.dump(sizes, target)
        target.writelines(pieces)
    return total


def unpack(block: int) -> Any:
    """Read what ``pack`` wrote; the block is free again afterwards."""
    with open(block, "rb", closefd=False) as file:
        file.seek(0)
        body, *buffers = (bytearray(size) for size in pickle.load(file))
        for piece in (body, *buffers):
            if file.readinto(piece) < len(piece):
                raise EOFError("a value is shorter than its head says")
    return pickle.loads(body, buffers=buffers)


def first_that_cant_be_packed(values: list[Any], block: int) -> tuple[int, Exception]:
    """Of values that can't be packed together, the place of the first that is to blame, and what
    it raises.
    """
    for place, value in enumerate(values):
        try:
            pack(value, block)
        except Exception as error:
            return place, error
    raise RunError("values that can be sent one by one can't be sent together")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Keeps large buffers apart, and tells the pickler that a tensor is one.

    Attributes:
        pieces: the buffers, in order.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take)
        self.pieces: list[memoryview] = []
        self._held: list[Any] = []

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether it is to be in the pickle."""
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
        kind = nn.Parameter if type(tensor) is nn.Parameter else torch.Tensor
        flat = tensor.detach().cpu().resolve_conj().resolve_neg()
        if torch.empty_like(flat).stride() != flat.stride():  # it has gaps, or overlaps
            flat = flat.contiguous()
        self._held.append(flat)
        size = flat.numel() * flat.element_size()
        data = (ctypes.c_ubyte * size).from_address(flat.data_ptr()) if size else bytearray()
        return _rebuilt, (
            pickle.PickleBuffer(data),
            flat.dtype,
            tuple(flat.shape),
            flat.stride(),
            kind,
            learns,
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers in memory are all there is to it; any other goes as PyTorch pickles
    it.
    """
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
        made = torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(shape, stride)
    return nn.Parameter(made, learns) if kind is nn.Parameter else made.requires_grad_(learns)
