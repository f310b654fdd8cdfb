"""Digest: a few numbers that tell the values of a tensor from others, without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor

_PLACES = 1009
"""A prime, so that neither rows nor columns of a matrix come to lie in one place of a digest."""

_ROWS = 32
"""Rows that are added at once: they stay in a core's cache, and are too few for PyTorch to wake
threads.
"""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def bits_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the bits of a strided tensor in one row, as whole numbers.

    There is no copy where the tensor is contiguous.

    Args:
        tensor: of any format.
        dtype: of the whole numbers; no larger than an element.
    """
    flat = tensor.detach().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride
    return flat.view(dtype)


def digest(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return two sums that tell different values apart: plain, and weighted by place.

    The bits are added, as whole numbers: the sums are the same for any number of threads, none is
    infinite or NaN, and no copy as large as the tensor is made.

    Returns:
        The sums; None for a tensor without values in memory.
    """
    if tensor is None or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    flat = tensor.detach().resolve_conj()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    bits = bits_of(flat, _BITS[flat.element_size()])
    rows = bits.numel() // _PLACES
    last = bits[rows * _PLACES :]

    if rows:
        sums = torch.zeros(_PLACES, dtype=torch.int64, device=bits.device)
        whole_rows = bits[: rows * _PLACES].view(rows, _PLACES)
        for block in torch.split(whole_rows, _ROWS):
            sums += block.sum(0)
        sums[: len(last)] += last
    else:  # most are as small as that: samples, counters, running statistics
        sums = last.long()

    places = torch.arange(1, len(sums) + 1, device=bits.device)
    return int(sums.sum()), int((sums * places).sum())
