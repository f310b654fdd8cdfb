"""Rows: which samples a model was given, seen by what it was given.

The numbers of samples that a loader tells would not show a step that takes others. So each row of inputs and targets is
made a number of 64 bits of its own bits, the same wherever it is computed and however the batch was cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.tensors.pytree import tensors

_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # those of splitmix64, as signed numbers
_FORMATS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_numbers(inputs: Any, targets: Any, size: int) -> torch.Tensor | None:
    """A number for each of ``size`` samples: (size,), or None where no tensor has a row for each."""
    found: torch.Tensor | None = None
    for place, tensor in enumerate(tensors((inputs, targets))):
        if not tensor.dim() or tensor.shape[0] != size or tensor.layout != torch.strided or not tensor.numel():
            continue
        rows = tensor.detach().cpu()
        rows = torch.view_as_real(rows) if rows.is_complex() else rows
        rows = rows.contiguous().reshape(size, -1)
        bits = rows.view(_FORMATS[rows.element_size()]).to(torch.int64)
        weights = _mixed(torch.arange(bits.shape[1]) + ((place + 1) << 40)) | 1
        numbers = _mixed((_mixed(bits) * weights).sum(dim=1))
        found = numbers if found is None else _mixed(found * 3 + numbers)
    return found


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    for factor in _FACTORS:
        numbers = (numbers ^ (numbers >> 31)) * factor
    return numbers ^ (numbers >> 29)


@dataclass(frozen=True)
class Rows:
    """How the samples of one side differ from those of one device.

    Attributes:
        repeated: numbers in the dataset of those that were used more often.
        left_out: of those that were used less often.
        others: how many are no samples of that batch at all.
    """

    repeated: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    others: int = 0

    def __bool__(self) -> bool:
        return bool(self.repeated or self.left_out or self.others)


def rows_apart(ours: list[int], theirs: list[int], samples: list[int] | None) -> Rows:
    """Compare the row numbers of one device (``theirs``) with those of a strategy.

    Args:
        ours: of the strategy's devices, in any order.
        theirs: of one device.
        samples: the numbers in the dataset of ``theirs``, where they are known; else places in the batch are given.
    """
    names = dict(zip(theirs, samples if samples is not None else range(len(theirs)), strict=True))
    counts, wanted = Counter(ours), Counter(theirs)
    more, fewer = counts - wanted, wanted - counts
    return Rows(
        tuple(sorted(names[row] for row in more if row in names)),
        tuple(sorted(names[row] for row in fewer)),
        sum(count for row, count in more.items() if row not in names),
    )
