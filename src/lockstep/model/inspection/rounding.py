"""Whether numbers lie further apart than other ways to round would bring them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
"""How far outputs of other ways to round lie apart, as a part of the largest."""

_OF_CPU = 1e-4
"""The same in float32 where no accelerator multiplies with fewer bits."""


_CANCELLED = 1e-11
"""What may be left in float64 of numbers that cancel: outputs may be no more than that."""


def outputs_differ(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether outputs of a model do, which may be differences."""
    return differ(ones, others, least=_CANCELLED)


def differ(ones: list[torch.Tensor], others: list[torch.Tensor], *, least: float = 0.0) -> bool:
    """Whether two lists of numbers lie further apart than other ways to round would bring them.

    In float64 also further than ``least``.
    """
    for a, b in zip(ones, others, strict=True):
        if not a.numel():
            continue
        rounding = ROUNDING.get(a.dtype, 5e-2)
        if a.dtype == torch.float32 and a.device.type == "cpu":
            rounding = _OF_CPU
        finite = torch.isfinite(a)
        apart = torch.where(finite, a - b, 0.0).abs()
        # Of numbers that are the same the usual ones count only: not -1e9, which masks others.
        sizes = a.abs().flatten()
        usual = sizes.kthvalue(len(sizes) // 4 + 1).values
        largest = torch.maximum(
            torch.where(finite & (apart != 0), a.abs(), 0.0).max(),
            usual.nan_to_num(0.0, posinf=0.0),
        )
        # (Not "greater": what isn't finite for a part only, the variance of one sample say,
        # differs.)
        bound = (
            rounding * largest
            if a.dtype != torch.float64
            else (rounding * largest).clamp(min=least)
        )
        if not bool(apart.max() <= bound):
            return True
    return False


def first_apart(
    names: Sequence[str], ones: list[torch.Tensor], others: list[torch.Tensor]
) -> str | None:
    """The name of the first gradient that isn't the other one."""
    largest = max((float(g.abs().max()) for g in ones if g.numel()), default=0.0)
    for name, one, other in zip(names, ones, others, strict=True):
        # (Some gradients are zero but for rounding, as that of the bias of keys in attention.)
        beyond = (
            one.numel()
            and not float((one - other).abs().max()) <= ROUNDING.get(one.dtype, 1.0) * largest
        )
        if beyond and differ([one], [other]):
            return name
    return None
