"""Measures: how far two values lie apart.

For a parameter, with d its change since the common start::

    difference = max|d_a - d_b| / max(max|d_b|, learning rate x steps)

In float64 rounding is near 1e-15, and a wrong weight of one sample shows as 1e-3.
"""

from __future__ import annotations

import math

import torch


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
