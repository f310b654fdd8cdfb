"""Measures: how far two values lie apart, and which samples the forwards were given.

For a parameter, with d its change since the common start::

    difference = max|d_a - d_b| / max(max|d_b|, learning rate x steps)

In float64 rounding is near 1e-15, and a wrong weight of one sample shows as 1e-3.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

import torch

from lockstep.tensors.digest import bits_of
from lockstep.tensors.pytree import tensors
from lockstep.tensors.rows import has_rows


def change_apart(apart: float, change: float, reach: float) -> float:
    """Return the measure of one parameter.

    Args:
        apart: max|d_a - d_b|.
        change: max|d_b|.
        reach: learning rate x steps.
    """
    scale = max(change, reach)
    return apart / scale if scale else apart


def buffer_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max|a - b| over max(max|b|, 1) for two values of a buffer."""
    if a.shape != b.shape:
        return math.inf
    scale = max(largest(real(b)), 1.0)
    return largest(real(a) - real(b)) / scale


def relative(a: float, b: float) -> float:
    """Return |a - b| / |b|; infinite where one of them is no number."""
    if a == b:
        return 0.0
    if math.isnan(a) and math.isnan(b):
        return 0.0
    if not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-6)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 on the CPU; a complex one as pairs."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double()


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; infinite where one is NaN."""
    if not tensor.numel():
        return 0.0
    # A fifth of the time of a norm.
    lowest, highest = map(float, tensor.aminmax())
    if math.isnan(highest):
        return math.inf
    return max(highest, -lowest)  # of equal ones the first, and -0.0 would be written so


def row_ids(inputs: Any, targets: Any, size: int) -> list[bytes]:
    """Return an id for each sample.

    An id is a hash of the bits of a sample's rows: the same in any order and on any rank, and equal
    samples have equal ids.

    Args:
        inputs: of the model.
        targets: of the loss.
        size: the number of samples.

    Returns:
        The ids; none where no tensor has a row for each sample.
    """
    found = []
    for tensor in tensors((inputs, targets)):
        if has_rows(tensor, size) and tensor.layout == torch.strided and tensor.numel():
            rows = bits_of(tensor.detach().cpu().resolve_conj().resolve_neg())
            found.append(rows.view(size, -1).numpy())

    ids = []
    for rows_of_sample in zip(*found, strict=True):
        sample = b"".join(map(bytes, rows_of_sample))
        ids.append(hashlib.blake2b(sample, digest_size=8).digest())

    return ids


def samples_apart(ours: list[bytes], theirs: list[bytes]) -> int:
    """Return how many samples one side used oftener than the other.

    Args:
        ours: the row ids of the strategy's samples, in any order.
        theirs: those of one device.
    """
    used = Counter(ours)
    wanted = Counter(theirs)
    return (used - wanted).total() + (wanted - used).total()
